"""Who may import whom: the dependency rules of the architecture, and no torch in the router and the clients.

The packages are those that are there: a new service is held to the rules without a change here.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = ROOT / "clients" / "python"
STUBS = ("omnistage.v1", "omnistage.stage.v1")
# A library that stages share; not a service, and not for the router, which knows no model.
STAGE_LIBRARY = "services.voxtral"
WITHOUT_STAGE_LIBRARY = {"services.router", "services.gateway"}
WITHOUT_TORCH = ("omnistage", "services.router", "services.gateway")
TORCH_USERS = ("torch", "torchaudio", "torchvision", "diffusers", "transformers", "safetensors.torch")
OURS = ("stage_runtime", "services", "omnistage")


@dataclass(frozen=True)
class Import:
    """That `importer` imports `target` (absolute) somewhere, at the top or within a function."""

    importer: str
    target: str
    place: str


def within(name: str, *packages: str) -> bool:
    """Whether a module is one of the packages or lies in one."""
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def modules(root: Path) -> dict[str, Path]:
    """All modules of the project below `root` by name."""
    found: dict[str, Path] = {}
    for base, package in ((root, "stage_runtime"), (root, "services"), (root / "clients" / "python", "omnistage")):
        for path in sorted((base / package).rglob("*.py")):
            parts = path.relative_to(base).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, path: Path, root: Path) -> Iterator[Import]:
    """What a module imports. `from a import b` counts as a and as a.b, as b may be a module."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(), path)):
        targets: list[str] = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.rsplit(".", node.level - 1)[0] if node.level else ""
            base = ".".join(filter(None, [above, node.module]))
            targets = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        for target in targets:
            yield Import(name, target, f"{path.relative_to(root)}:{node.lineno}")


def all_imports(root: Path) -> list[Import]:
    """Every import of every module of the project below `root`."""
    return [found for name, path in modules(root).items() for found in imports(name, path, root)]


def is_allowed(importer: str, target: str) -> bool:
    """Whether the architecture lets a module of ours import `target`. A parent package alone gives nothing away."""
    if not within(target, *OURS) or target in {"services", "omnistage", "omnistage.stage"}:
        return True
    if within(importer, *STUBS):
        return within(target, *STUBS)
    if within(importer, "stage_runtime"):
        return within(target, "stage_runtime", *STUBS)
    if within(importer, "omnistage"):
        return within(target, "stage_runtime", "omnistage")
    service = ".".join(importer.split(".")[:2])
    library = () if service in WITHOUT_STAGE_LIBRARY else (STAGE_LIBRARY,)
    return within(target, service, "stage_runtime", *STUBS, *library)


def forbidden(root: Path) -> list[str]:
    """The imports that break the rules, as text."""
    return [
        f"{found.place}: {found.importer} imports {found.target}"
        for found in all_imports(root)
        if not is_allowed(found.importer, found.target)
    ]


def ways_to_torch(root: Path) -> list[str]:
    """How router and clients reach torch through modules of ours, each as a chain of names; [] if they do not."""
    known = modules(root)
    targets: dict[str, set[str]] = {name: set() for name in known}
    for found in all_imports(root):
        targets[found.importer].add(found.target)
    chains = {name: name for name in known if within(name, *WITHOUT_TORCH)}
    waiting = list(chains)
    ways = []
    while waiting:
        name = waiting.pop()
        for target in sorted(targets[name]):
            if within(target, *TORCH_USERS):
                ways.append(f"{chains[name]} -> {target}")
            # importing a.b.c runs a and a.b too
            parts = target.split(".")
            for module in (".".join(parts[:count]) for count in range(1, len(parts) + 1)):
                if module in known and module not in chains:
                    chains[module] = f"{chains[name]} -> {module}"
                    waiting.append(module)
    return ways


def test_imports_follow_the_architecture() -> None:
    """The runtime imports no service, no service another, and clients only the runtime and the stubs."""
    assert len(modules(ROOT)) > 10

    assert forbidden(ROOT) == []


def test_router_and_clients_cannot_reach_torch() -> None:
    """No module that the router or the clients import, directly or not, imports torch, not even within a function."""
    assert ways_to_torch(ROOT) == []


@pytest.mark.parametrize("package", ["services.router", "omnistage"])
def test_importing_router_and_clients_does_not_load_torch(package: str) -> None:
    """A process that imported every module of the router or of the clients has not loaded torch."""
    names = [name for name in modules(ROOT) if within(name, package)]
    assert any(not within(name, *STUBS, "omnistage.stage") for name in names if name != package), names
    script = f"import sys, {', '.join(names)}\nprint(*sorted(sys.modules.keys() & set({TORCH_USERS!r})))"

    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)

    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == ""


@pytest.mark.parametrize(
    ("file", "statement", "message"),
    [
        ("stage_runtime/a.py", "import services.router", "stage_runtime.a imports services.router"),
        ("stage_runtime/a.py", "from omnistage import client", "stage_runtime.a imports omnistage.client"),
        ("services/codec/a.py", "from services.router import b", "services.codec.a imports services.router"),
        ("services/codec/a.py", "from ..router import b", "services.codec.a imports services.router"),
        ("services/codec/a.py", "from omnistage.client import C", "services.codec.a imports omnistage.client"),
        ("services/router/a.py", "import services.voxtral.params", "services.router.a imports services.voxtral.params"),
        ("services/voxtral/a.py", "import services.codec", "services.voxtral.a imports services.codec"),
        (
            "clients/python/omnistage/a.py",
            "def f():\n    import services.router",
            "omnistage.a imports services.router",
        ),
    ],
)
def test_a_forbidden_import_is_found(tmp_path: Path, file: str, statement: str, message: str) -> None:
    """Each kind of forbidden import, absolute, relative or within a function, is reported with its place."""
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(f"{statement}\n")

    found = forbidden(tmp_path)

    assert any(line.startswith(f"{file}:") and message in line for line in found), found


@pytest.mark.parametrize(
    ("file", "statement"),
    [
        ("stage_runtime/a.py", "from omnistage.stage.v1 import stage_pb2"),
        (
            "services/codec/a.py",
            "from services.voxtral.params import P\nfrom stage_runtime import errors\nfrom . import b",
        ),
        ("services/router/a.py", "from omnistage.v1 import speech_pb2\nfrom services.router.b import C"),
        ("clients/python/omnistage/a.py", "import stage_runtime.errors\nfrom omnistage.v1 import speech_pb2"),
    ],
)
def test_an_allowed_import_is_let_pass(tmp_path: Path, file: str, statement: str) -> None:
    """Stubs, the runtime, a service's own modules, and the stages' library for stages, may be imported."""
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(f"{statement}\n")

    assert forbidden(tmp_path) == []


def test_an_indirect_way_to_torch_is_found(tmp_path: Path) -> None:
    """Torch behind the package of an imported module, within a function, is found, with the way that leads there."""
    for file, text in {
        "services/router/a.py": "from stage_runtime.deep.module import f",
        "stage_runtime/deep/__init__.py": "from stage_runtime import lazy",
        "stage_runtime/deep/module.py": "",
        "stage_runtime/lazy.py": "def f():\n    import torch.nn",
        "stage_runtime/unused.py": "import torch",
    }.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(f"{text}\n")

    assert ways_to_torch(tmp_path) == ["services.router.a -> stage_runtime.deep -> stage_runtime.lazy -> torch.nn"]
