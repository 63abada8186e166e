"""Files that appear under their names only when they are complete."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def new_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write and read; it gets its name, in place of what had it, when the block ends, and is gone if the block raises.

    Until then it is a hidden ".part" file in the same folder. Something that is no regular file, such as a pipe or a device, is
    written to directly. Raises OSError if the file cannot be made.
    """
    target = Path(path).resolve()
    if target.exists() and not target.is_file():
        with target.open("wb") as file:
            yield file
        return
    part = target.parent / f".omnistage-{secrets.token_hex(8)}.part"
    try:
        with part.open("x+b") as file:
            yield file
        part.replace(target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
