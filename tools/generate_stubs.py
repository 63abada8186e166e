"""Generate the Python stubs of protos/ into clients/python (`make proto`), or check that they are fresh (`--check`)."""

from __future__ import annotations

import argparse
import filecmp
import shutil
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from google.protobuf import descriptor_pb2
from google.rpc import status_pb2
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parents[1]
PROTOS = ROOT / "protos"
OUT = ROOT / "clients" / "python"
DESCRIPTORS = ROOT / "build" / "protos.binpb"

# Field 8042 of a file in an image, {is_import: true}: see ImageFile in buf/alpha/image/v1/image.proto of buf's sources.
BUF_IS_IMPORT = bytes([0xD2, 0xF6, 0x03, 0x02, 0x08, 0x01])

# google/rpc/*.proto and google/protobuf/*.proto come with these packages.
GOOGLE_RPC = Path(status_pb2.__file__).parents[2]
GOOGLE_PROTOBUF = Path(str(files("grpc_tools"))) / "_proto"

INIT = '"""Generated protobuf and gRPC stubs; `make proto` writes them from protos/."""\n'


def sources(protos: Path = PROTOS) -> list[Path]:
    """All .proto files of the project, sorted."""
    return sorted(protos.rglob("*.proto"))


def run_protoc(*arguments: str, protos: Path = PROTOS) -> None:
    """Run protoc over the files below `protos`; raises SystemExit when it fails."""
    includes = [f"-I{protos}", f"-I{GOOGLE_RPC}", f"-I{GOOGLE_PROTOBUF}"]
    if protoc.main(["protoc", *includes, *arguments, *map(str, sources(protos))]) != 0:
        raise SystemExit("protoc failed; its messages stand above")


def write_descriptors(out: Path, *, protos: Path = PROTOS, source_info: bool = True) -> None:
    """Write the image of the files below `protos` and of all they import to `out`, for buf.

    It is protoc's FileDescriptorSet with one addition: imported files are marked as buf marks them, so that they are neither
    linted nor held compatible.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    extra = ["--include_source_info"] if source_info else []
    run_protoc("--include_imports", *extra, f"--descriptor_set_out={out}", protos=protos)
    image = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes())
    own = {source.relative_to(protos).as_posix() for source in sources(protos)}
    for file in image.file:
        if file.name not in own:
            file.MergeFromString(BUF_IS_IMPORT)
    out.write_bytes(image.SerializeToString(deterministic=True))


def generate(out: Path) -> list[Path]:
    """Write the stubs below `out` and return their paths relative to it, sorted."""
    run_protoc(
        f"--python_out={out}",
        f"--grpc_python_out={out}",
        f"--mypy_out=quiet,readable_stubs:{out}",
        f"--mypy_grpc_out=quiet,readable_stubs:{out}",
    )
    for folder in {(out / source.relative_to(PROTOS)).parent for source in sources()}:
        # omnistage/__init__.py is hand-written, all below it is generated
        for package in (folder, *folder.parents[: len(folder.relative_to(out).parts) - 2]):
            (package / "__init__.py").write_text(INIT)
    return sorted(
        path.relative_to(out) for path in out.rglob("*") if path.suffix in {".py", ".pyi"} and is_generated(path)
    )


def is_generated(path: Path) -> bool:
    """Whether `path` is a file that `generate` writes."""
    return "_pb2" in path.name or (path.name == "__init__.py" and path.read_text() == INIT)


def stale(fresh: Path) -> list[Path]:
    """Generated files that differ from, are missing in, or are left over in the checked-in tree."""
    wanted = set(generate(fresh))
    present = {path.relative_to(OUT) for path in OUT.rglob("*.py*") if path.suffix != ".pyc" and is_generated(path)}
    changed = {path for path in wanted & present if not filecmp.cmp(fresh / path, OUT / path, shallow=False)}
    return sorted(changed | (wanted ^ present))


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the checked-in stubs are stale")
    parser.add_argument("--descriptors", action="store_true", help=f"write {DESCRIPTORS.relative_to(ROOT)} for buf")
    options = parser.parse_args()
    if options.descriptors:
        write_descriptors(DESCRIPTORS)
    elif options.check:
        with tempfile.TemporaryDirectory() as folder:
            if names := stale(Path(folder)):
                raise SystemExit(f"stale generated files (run `make proto`): {', '.join(map(str, names))}")
    else:
        for old in OUT.rglob("*_pb2*"):
            old.unlink()
        generate(OUT)


if __name__ == "__main__":
    if shutil.which("protoc-gen-mypy") is None:
        sys.exit("protoc-gen-mypy is not on PATH: activate the virtual environment (or run `make proto`)")
    main()
