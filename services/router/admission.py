"""Admission: a bounded number of requests at work, a bounded queue in front of them, everything beyond refused at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from stage_runtime.errors import QueueFull

RETRY_S = 1.0


class Admission:
    """First come, first served. Cancelling a waiting request takes it out of the queue."""

    def __init__(self, name: str, *, max_concurrent: int, max_queued: int) -> None:
        self._name = name
        self._max_concurrent = max_concurrent
        self._max_queued = max_queued
        self._active = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def active_count(self) -> int:
        """Requests at work."""
        return self._active

    @property
    def queued_count(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Hold a place among the requests at work; raises QueueFull at once if the queue is full."""
        await self._enter()
        try:
            yield
        finally:
            self._leave()

    async def _enter(self) -> None:
        if self._active < self._max_concurrent:
            self._active += 1
            return
        if len(self._waiting) >= self._max_queued:
            raise QueueFull(f"pipeline {self._name!r}", self._max_queued, retry_after_s=RETRY_S)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave()  # the place came in the same moment as the cancel: pass it on
            else:
                self._waiting.remove(turn)
            raise

    def _leave(self) -> None:
        """Hand the place to the next in line, or free it."""
        if self._waiting:
            self._waiting.popleft().set_result(None)
        else:
            self._active -= 1
