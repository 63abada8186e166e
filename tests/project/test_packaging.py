"""What the built distribution contains."""

from __future__ import annotations

import configparser
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "stage_runtime": ROOT / "stage_runtime",
    "services": ROOT / "services",
    "omnistage": ROOT / "clients" / "python" / "omnistage",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """The wheel, built with what is installed: no network is needed."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--no-input"]
    result = subprocess.run([*command, "--wheel-dir", folder, ROOT], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def _info(wheel: zipfile.ZipFile, name: str) -> str:
    (path,) = [path for path in wheel.namelist() if path.endswith(f".dist-info/{name}")]
    return wheel.read(path).decode()


def test_wheel_contains_every_module_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    """The wheel holds exactly the Python files and type markers of the three packages."""
    expected = {
        str(Path(name) / path.relative_to(folder))
        for name, folder in PACKAGES.items()
        for pattern in ("*.py", "*.pyi", "py.typed")
        for path in folder.rglob(pattern)
    }
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}

    assert {name for name in names if name.endswith((".py", ".pyi", "py.typed"))} == expected
    assert {name.split("/")[0] for name in names} == PACKAGES.keys()


def test_wheel_is_typed(wheel: zipfile.ZipFile) -> None:
    """Type checkers may use the annotations of the client and of the stage runtime."""
    assert {"omnistage/py.typed", "stage_runtime/py.typed"} <= set(wheel.namelist())


def test_console_script_leads_to_a_module_of_the_wheel(wheel: zipfile.ZipFile) -> None:
    """The command `omnistage` is installed and its module is there."""
    parser = configparser.ConfigParser()
    parser.read_string(_info(wheel, "entry_points.txt"))

    target = parser["console_scripts"]["omnistage"]

    path = target.partition(":")[0].replace(".", "/")
    assert {f"{path}.py", f"{path}/__init__.py"} & set(wheel.namelist()), target


def test_wheel_states_its_licence(wheel: zipfile.ZipFile) -> None:
    """The metadata names Apache-2.0 and the wheel holds its text."""
    metadata = Parser().parsestr(_info(wheel, "METADATA"))

    assert metadata["License-Expression"] == "Apache-2.0"
    assert _info(wheel, "licenses/LICENSE") == (ROOT / "LICENSE").read_text()


def test_torch_is_needed_by_stages_only(wheel: zipfile.ZipFile) -> None:
    """Installing without extras brings no torch, so that routers and clients stay small."""
    requirements = Parser().parsestr(_info(wheel, "METADATA")).get_all("Requires-Dist")
    assert requirements is not None

    torch = [requirement for requirement in requirements if requirement.startswith("torch")]

    assert torch
    assert all("extra == 'stages'" in requirement for requirement in torch)
