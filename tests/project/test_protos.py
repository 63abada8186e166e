"""tools/check_protos.py: what it refuses and what it allows, in a repository of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SPEECH = Path("protos/omnistage/v1/speech.proto")
NOTHING_RELEASED = "nothing is released yet"
FIELD = "  // Indices for a test. Default: empty.\n  repeated int32 probe = 99;\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the protos and the tools, without history and without a released image."""
    for folder in ("tools", "protos"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    (tmp_path / "protos" / "released.binpb").unlink(missing_ok=True)
    return tmp_path


def _check(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tools/check_protos.py", *arguments]
    return subprocess.run(
        command, cwd=project, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )


def _git(project: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.invalid", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *arguments], cwd=project, check=True, capture_output=True)


def _commit_all(project: Path, message: str) -> None:
    _git(project, "add", ".")
    _git(project, "commit", "--quiet", "--no-verify", "--message", message)


def _replace(project: Path, old: str, new: str) -> None:
    path = project / SPEECH
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


ADD_FIELD = ("message AudioChunk {\n", f"message AudioChunk {{\n{FIELD}")
CHANGE_TYPE = ("bytes audio = 1;", "string audio = 1;")


def test_protos_of_the_project_pass(project: Path) -> None:
    """The checked-in protos are well-formed, and without history the check says that there is nothing to compare with."""
    result = _check(project)

    assert result.returncode == 0, result.stdout
    assert NOTHING_RELEASED in result.stdout
    assert "no earlier version of them" in result.stdout


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("  // Index of the first sample of this chunk, from 0.\n", "", "comment"),
        ("int64 sample_offset = 2;", "int64 SampleOffset = 2;", "lower_snake_case"),
        ("int64 sample_offset = 2;", "int64  sample_offset = 2;", "failed: format"),
    ],
    ids=["comment missing", "wrong case", "wrong layout"],
)
def test_faulty_form_is_refused(project: Path, old: str, new: str, complaint: str) -> None:
    """A missing comment, a name in the wrong case, or another layout than buf's fails the check."""
    _replace(project, old, new)

    result = _check(project)

    assert result.returncode == 1
    assert complaint in result.stdout


def test_incompatible_change_before_the_first_release_is_noted(project: Path) -> None:
    """Before a release an incompatible change is shown, uncommitted or as the last commit, but allowed."""
    _git(project, "init", "--quiet")
    _commit_all(project, "one")
    _replace(project, *CHANGE_TYPE)
    uncommitted = _check(project)
    _commit_all(project, "two")
    (project / "other.txt").touch()
    _commit_all(project, "three, which leaves the protos alone")
    committed = _check(project)

    for result in (uncommitted, committed):
        assert result.returncode == 0, result.stdout
        assert NOTHING_RELEASED in result.stdout
        assert 'changed type from "bytes" to "string"' in result.stdout
        assert "incompatible with the protos before this change" in result.stdout


def test_compatible_change_before_the_first_release_is_noted(project: Path) -> None:
    """Before a release a compatible change is called so."""
    _git(project, "init", "--quiet")
    _commit_all(project, "one")
    _replace(project, *ADD_FIELD)

    result = _check(project)

    assert result.returncode == 0, result.stdout
    assert "protos: compatible with the protos before this change" in result.stdout


def test_change_that_breaks_a_release_is_refused(project: Path) -> None:
    """After a release an incompatible change fails the check, and it cannot be released."""
    assert _check(project, "--release").returncode == 0
    image = (project / "protos" / "released.binpb").read_bytes()
    _replace(project, *CHANGE_TYPE)

    result = _check(project, "--release")

    assert result.returncode == 1
    assert 'changed type from "bytes" to "string"' in result.stdout
    assert (project / "protos" / "released.binpb").read_bytes() == image


def test_deleting_a_released_file_is_refused(project: Path) -> None:
    """A file that was released must stay."""
    assert _check(project, "--release").returncode == 0
    (project / "protos" / "omnistage" / "v1" / "pipeline.proto").unlink()

    result = _check(project)

    assert result.returncode == 1
    assert "pipeline.proto" in result.stdout


def test_additions_to_a_release_may_change_until_they_are_released(project: Path) -> None:
    """A field that was added after the release may be changed again, as nobody was promised it."""
    assert _check(project, "--release").returncode == 0
    _replace(project, *ADD_FIELD)
    added = _check(project)
    _replace(project, "repeated int32 probe = 99;", "string probe = 99;")

    changed = _check(project)

    assert added.returncode == 0, added.stdout
    assert changed.returncode == 0, changed.stdout
    assert "compatible with the last release" in changed.stdout


def test_dropping_an_import_of_google_is_no_break(project: Path) -> None:
    """Files of Google that the protos no longer import are not ours to keep."""
    path = project / "protos" / "omnistage" / "v1" / "extra.proto"
    head = 'syntax = "proto3";\n\n// Of a test.\npackage omnistage.v1;\n'
    message = "\n// Of a test.\nmessage Extra {\n  // Of a test.\n  google.protobuf.FieldMask mask = 1;\n}\n"
    path.write_text(f'{head}\nimport "google/protobuf/field_mask.proto";\n{message}')
    released = _check(project, "--release")
    path.write_text(head)

    result = _check(project)

    assert released.returncode == 0, released.stdout
    assert "field_mask.proto" not in result.stdout
    assert "extra.proto" in result.stdout
