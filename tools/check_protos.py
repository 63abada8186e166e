"""Check the form of protos/ with buf and their compatibility with what was released (`make check-protos`).

buf reads images that protoc wrote: it would fetch google/rpc/status.proto from its registry, protoc finds it in an installed
package. docs/decisions/0001-proto-compatibility.md says what is compared with what, and why. `--release` (`make
proto-release`) checks and then writes protos/released.binpb.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from generate_stubs import DESCRIPTORS, PROTOS, ROOT, write_descriptors

RELEASED = PROTOS / "released.binpb"
BUF = Path(sys.executable).with_name("buf")

# buf's own exit status for findings, as opposed to a failure to run.
BUF_FINDINGS = 100


def buf(*arguments: str | Path) -> bool:
    """Run buf; True if it found nothing, False if it printed findings. Raises SystemExit when it could not run."""
    status = subprocess.run([BUF, *arguments], cwd=ROOT, stdin=subprocess.DEVNULL, check=False).returncode
    if status not in {0, BUF_FINDINGS}:
        raise SystemExit(f"buf {arguments[0]} failed with exit status {status}; its message stands above")
    return status == 0


def lint() -> bool:
    """Names and comments of the project's files."""
    return buf("lint", DESCRIPTORS)


def layout() -> bool:
    """Format of the sources; prints the difference."""
    return buf("format", PROTOS, "--diff", "--exit-code")


def compatible_with(image: Path) -> bool:
    """Whether code built for `image` goes on working with the protos of the working tree."""
    return buf("breaking", DESCRIPTORS, "--against", image, "--exclude-imports")


def git(*arguments: str) -> bytes | None:
    """Output of a git command in the project, or None if it fails (no repository, no such commit, no git)."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=False)  # noqa: S607
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


def previous_commit() -> str | None:
    """The newest commit whose protos differ from the working tree's, or None if history does not go back so far."""
    if git("diff", "--quiet", "HEAD", "--", "protos") is None and git("rev-parse", "HEAD") is not None:
        return "HEAD"
    last_change = git("log", "-1", "--format=%H", "--", "protos")
    before = f"{last_change.decode().strip()}^" if last_change else "HEAD^"
    return before if git("ls-tree", "-r", "--name-only", before, "--", "protos") else None


def note_changes_since(commit: str) -> None:
    """Print what changed incompatibly since `commit`. No failure: nothing of it was promised to anybody."""
    archive = git("archive", "--format=tar", commit, "protos")
    name = git("rev-parse", "--short", commit)
    if archive is None or name is None:
        raise SystemExit(f"git cannot read protos/ of commit {commit}")
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(folder, filter="data")
        image = Path(folder) / "previous.binpb"
        write_descriptors(image, protos=Path(folder) / "protos", source_info=False)
        same = compatible_with(image)
    against = f"the protos before this change (commit {name.decode().strip()})"
    print(
        f"protos: compatible with {against}" if same else f"protos: the above is incompatible with {against}: allowed"
    )


def breaking() -> bool:
    """Compatibility with the last release; before the first one, a note of what changed."""
    if RELEASED.exists():
        fine = compatible_with(RELEASED)
        print(f"protos: {'compatible' if fine else 'NOT compatible'} with the last release ({RELEASED.name})")
        return fine
    print(f"protos: nothing is released yet (no {RELEASED.relative_to(ROOT)}), so changes may be incompatible")
    if commit := previous_commit():
        note_changes_since(commit)
    else:
        print("protos: git has no earlier version of them to compare with")
    return True


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--release", action="store_true", help=f"if all is well, write {RELEASED.relative_to(ROOT)}")
    options = parser.parse_args()
    write_descriptors(DESCRIPTORS)
    results = {"lint": lint(), "format (run `buf format -w protos`)": layout(), "breaking": breaking()}
    if failed := [name for name, fine in results.items() if not fine]:
        raise SystemExit(f"protos: failed: {', '.join(failed)}")
    if options.release:
        write_descriptors(RELEASED, source_info=False)
        print(f"protos: wrote {RELEASED.relative_to(ROOT)}; commit it with the release")


if __name__ == "__main__":
    main()
