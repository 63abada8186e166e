"""Locks between processes: held by an open file, so that the end of a process, however violent, releases them."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class FileLock:
    """An exclusive lock on a file that exists only while it is held. Processes that inherit `fd` hold it too."""

    def __init__(self, path: Path) -> None:
        """Acquire without waiting. Raises BlockingIOError if another holder has it, OSError if the file cannot be made."""
        self.path = path
        while True:
            self.fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BaseException:
                os.close(self.fd)
                raise
            held = os.fstat(self.fd)
            if file_id(path) == (held.st_dev, held.st_ino):
                return
            os.close(self.fd)  # the last holder removed it just before we got it

    def release(self) -> None:
        """Remove the file and let go. May be called again."""
        if self.fd >= 0:
            # In this order: who gets the lock in between sees that the file is gone, and starts over.
            self.path.unlink(missing_ok=True)
            os.close(self.fd)
            self.fd = -1


def file_id(path: Path) -> tuple[int, int] | None:
    """Device and inode, or None if there is no such file. A symbolic link is not followed."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino
