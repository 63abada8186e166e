"""Documentation that can be checked: the error table, named files, links, docstrings of tests, no paths of one machine."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from stage_runtime.errors import all_errors

ROOT = Path(__file__).resolve().parents[2]
STRUCTURE = ROOT / "docs" / "structure.md"
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(#[^)\s]*)?\)")
CODE = re.compile(r"`([^`\n]+)`")
# A path below somebody's home or work folder, not preceded by more of a path, a URL or a variable.
MACHINE_PATH = re.compile(rb"(?<![\w.~$}/-])/(?:home|root|work|Users)/[\w.-]")


def _tracked() -> list[Path]:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    return [path for name in listing.split("\0") if name and (path := ROOT / name).is_file()]


def _pages() -> list[Path]:
    return [path for path in _tracked() if path.suffix == ".md" and "golden" not in path.parts]


def _error_rows() -> dict[str, list[str]]:
    rows = {}
    for line in (ROOT / "docs" / "reference" / "errors.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if re.fullmatch(r"`[A-Z][A-Z_]+`", cells[0]):
            assert cells[0] not in rows, f"{cells[0]} has two rows"
            rows[cells[0].strip("`")] = cells[1:]
    return rows


def _test_functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text(), path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield node


def _docstring_fault(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str | None:
    text = " ".join((ast.get_docstring(function) or "").split("\n\n")[0].split())
    if not text:
        return "has no docstring"
    if not text.endswith("."):
        return "has a docstring that does not end with a full stop"
    if re.search(r"[.!?] +[A-Z]", text):
        return "has a docstring of more than one sentence"
    return None


def test_every_error_is_documented_with_its_code_and_http_status() -> None:
    """The error table has exactly one row for each reason, with its gRPC code, HTTP status, retry advice and meaning."""
    rows = _error_rows()

    assert rows.keys() == all_errors().keys()
    for reason, error in all_errors().items():
        code, http_status, may_retry, meaning = rows[reason]
        assert (code, http_status) == (error.code.name, str(error.http_status)), reason
        assert may_retry, reason
        assert meaning.endswith("."), reason


def test_every_test_states_its_behaviour_in_one_sentence() -> None:
    """Every test function has a docstring of one sentence, which more paragraphs may explain."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    assert files

    faults = [
        f"{path.relative_to(ROOT)}:{function.lineno} {function.name} {fault}"
        for path in files
        for function in _test_functions(path)
        if (fault := _docstring_fault(function))
    ]

    assert faults == []


@pytest.mark.parametrize(
    ("docstring", "fault"),
    [
        ("", "no docstring"),
        ("A lost replica fails its requests", "full stop"),
        ("A replica is lost. Its requests fail.", "more than one sentence"),
        ("A lost replica\n    fails 1.5 requests.", None),
        ("A lost replica fails its requests.\n\n    Others live. This is why.", None),
    ],
)
def test_faulty_docstrings_are_found(docstring: str, fault: str | None) -> None:
    """Missing, unfinished and long-winded docstrings of tests are told apart from good ones."""
    (function,) = ast.parse(f'def test_it():\n    """{docstring}"""').body
    assert isinstance(function, ast.FunctionDef)

    found = _docstring_fault(function)

    assert fault in found if fault and found else found is fault


def test_structure_page_names_files_that_exist() -> None:
    """Every path in backticks on the structure page is there; patterns with * match something."""
    codes = {
        code.rstrip("/") for code in CODE.findall(STRUCTURE.read_text()) if re.fullmatch(r"[\w.*-]+(/[\w.*-]*)+", code)
    }
    paths = {code for code in codes if not re.fullmatch(r"\w+Service/\w+", code)}
    assert len(paths) > 10

    assert sorted(path for path in paths if not any(ROOT.glob(path))) == []


@pytest.mark.parametrize("page", _pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    """Every relative link of a page leads to a file or folder of the repository."""
    targets = {match.group(1) for match in LINK.finditer(page.read_text())}
    relative = {target for target in targets if not re.match(r"[a-z]+:", target)}

    assert sorted(target for target in relative if not (page.parent / target).exists()) == []


def test_no_file_names_a_path_of_one_machine() -> None:
    """No text file names an absolute path below somebody's home or work folder."""
    files = _tracked()
    assert ROOT / "README.md" in files

    found = [
        f"{path.relative_to(ROOT)}: {match.group().decode()}..."
        for path in files
        if b"\0" not in (content := path.read_bytes())
        for match in MACHINE_PATH.finditer(content)
    ]

    assert found == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"see %sroot/notes", True),
        (b'"%swork/main"', True),
        (b"file://%shome/me/a", False),
        (b"docs%swork/a", False),
        (b"${DIR}%shome/a", False),
    ],
)
def test_paths_of_one_machine_are_recognized(text: bytes, expected: bool) -> None:
    """Absolute paths of home and work folders are found; parts of longer paths, URLs and variables are not."""
    assert bool(MACHINE_PATH.search(text % b"/")) is expected
