"""Ways for a fake engine to be slow or to fail."""

from __future__ import annotations

import os
import time
from typing import Literal

from pydantic import Field

from stage_runtime.config import Settings

How = Literal["raise", "nan", "out_of_memory", "hang", "exit", "bad_shape"]
HANG_S = 3600.0


class FaultSettings(Settings):
    """What goes wrong, and when; `times` bounds how often."""

    how: How
    step: int = Field(0, ge=0, description="index of the output step at which it happens")
    times: int = Field(1_000_000_000, ge=1)


class Fault:
    """Counts down a FaultSettings and acts."""

    def __init__(self, settings: FaultSettings | None) -> None:
        self._settings = settings
        self._left = 0 if settings is None else settings.times

    def due(self, index: int, *hows: How) -> bool:
        """Whether a fault of one of these kinds is due at output step `index`; counts it."""
        settings = self._settings
        if settings is None or not self._left or settings.step != index or settings.how not in hows:
            return False
        self._left -= 1
        return True

    def act(self, index: int) -> None:
        """Raise, hang or die if that is due at output step `index`."""
        if self.due(index, "raise"):
            raise RuntimeError("a fault that the test asked for")
        if self.due(index, "out_of_memory"):
            raise MemoryError("an allocation that the test asked to fail")
        if self.due(index, "hang"):
            time.sleep(HANG_S)
        if self.due(index, "exit"):
            os._exit(13)
