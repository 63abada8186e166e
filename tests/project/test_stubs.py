"""The checked-in protobuf and gRPC stubs, and the versions they need."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
STUBS = ROOT / "clients" / "python"
SPEECH_STUB = Path("clients/python/omnistage/v1/speech_pb2.py")


def _check(root: Path) -> subprocess.CompletedProcess[str]:
    # protoc finds its plugins on PATH, beside the interpreter
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        [sys.executable, "tools/generate_stubs.py", "--check"],
        cwd=root,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def _generated_for(pattern: str, files: str) -> Version:
    """The one version that all generated files of a kind were made for."""
    versions = {re.search(pattern, path.read_text()) for path in STUBS.rglob(files)}
    found = {match.group(1) if match else "none" for match in versions}
    assert len(found) == 1, found
    return Version(found.pop())


def _requirements() -> dict[str, Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lines = [*project["project"]["dependencies"], *project["dependency-groups"]["dev"]]
    return {requirement.name: requirement for requirement in map(Requirement, lines)}


def _bound(requirement: Requirement, operator: str) -> Version:
    (bound,) = [Version(part.version) for part in requirement.specifier if part.operator == operator]
    return bound


PROTOBUF = (r"# Protobuf Python Version: (\S+)", "*_pb2.py")
GRPC = (r"GRPC_GENERATED_VERSION = '(\S+)'", "*_pb2_grpc.py")


def test_stubs_are_fresh() -> None:
    """The checked-in stubs are exactly what the protos generate."""
    result = _check(ROOT)

    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("fault", ["changed", "missing", "left over"])
def test_stale_stubs_are_found(tmp_path: Path, fault: str) -> None:
    """A stub that was edited, is missing, or has lost its proto makes the check fail and is named."""
    for folder in ("tools", "protos", "clients"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    stub = tmp_path / SPEECH_STUB
    if fault == "changed":
        stub.write_text(stub.read_text() + "# edited\n")
    elif fault == "missing":
        stub.unlink()
    else:
        stub = stub.with_name("gone_pb2.py")
        stub.touch()

    result = _check(tmp_path)

    assert result.returncode == 1
    assert str(stub.relative_to(tmp_path / "clients" / "python")) in result.stderr


@pytest.mark.parametrize(
    ("distribution", "generated"),
    [
        ("protobuf", PROTOBUF),
        ("grpcio", GRPC),
        ("grpcio-health-checking", GRPC),
        ("grpcio-reflection", GRPC),
        ("grpcio-status", GRPC),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_lower_bounds_are_the_versions_that_stubs_were_generated_for(
    distribution: str, generated: tuple[str, str]
) -> None:
    """The lowest version that the package allows can import the stubs, and the next major version is not allowed."""
    version = _generated_for(*generated)

    requirement = _requirements()[distribution]

    assert _bound(requirement, ">=") == version
    assert _bound(requirement, "<") == Version(str(version.major + 1))


def test_stubs_are_generated_with_the_pinned_tools() -> None:
    """The grpcio-tools that developers get is the one that the stubs were generated with."""
    assert _bound(_requirements()["grpcio-tools"], "==") == _generated_for(*GRPC)


def test_all_stubs_import_without_warnings() -> None:
    """Every generated module imports with the installed versions, warnings being errors."""
    modules = [".".join(path.relative_to(STUBS).with_suffix("").parts) for path in STUBS.rglob("*_pb2*.py")]
    assert modules

    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"import {', '.join(modules)}"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert result.returncode == 0, result.stderr
