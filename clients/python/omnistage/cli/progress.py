"""What `omnistage say` shows while it waits."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class SpeechProgress:
    """Audio made so far, time passed, and time until the first audio: live on a terminal, nothing elsewhere."""

    def __init__(self, console: Console) -> None:
        self._started_at = time.monotonic()
        self.audio_s = 0.0
        self.first_audio_s = 0.0
        columns = (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task("waiting for the server", total=None)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    @property
    def elapsed_s(self) -> float:
        """Time since the start."""
        return time.monotonic() - self._started_at

    def add(self, audio_s: float) -> None:
        """More audio came."""
        if not self.audio_s:
            self.first_audio_s = self.elapsed_s
        self.audio_s += audio_s
        text = f"{self.audio_s:.2f} s of audio, the first after {self.first_audio_s:.2f} s"
        self._progress.update(self._task, description=text)
