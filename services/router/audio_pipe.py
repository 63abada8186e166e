"""The bounded pipe between a pipeline and the client's stream."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Self

from services.router.pipelines.speech import Audio, SpeechOutcome
from stage_runtime.errors import ClientStalled


class AudioPipe:
    """Holds at most `limit` chunks: a client that reads slowly holds up its own generation, and only that.

    A failure comes out after the chunks that were made before it.
    """

    def __init__(self, limit: int, stall_s: float) -> None:
        self.outcome: SpeechOutcome | None = None
        self._limit = limit
        self._stall_s = stall_s
        self._pieces: deque[Audio] = deque()
        self._error: BaseException | None = None
        self._closed = False
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    async def put(self, piece: Audio) -> None:
        """Append a chunk; waits while the pipe is full. Raises ClientStalled when nothing was taken for too long."""
        while len(self._pieces) >= self._limit:
            self._room.clear()
            try:
                async with asyncio.timeout(self._stall_s):
                    await self._room.wait()
            except TimeoutError:
                raise ClientStalled(self._stall_s) from None
        self._pieces.append(piece)
        self._wake.set()

    def finish(self, outcome: SpeechOutcome) -> None:
        """No more chunks come; all went well."""
        self.outcome = outcome
        self._closed = True
        self._wake.set()

    def fail(self, error: BaseException) -> None:
        """No more chunks come; `error` is raised to the reader after the last one."""
        self._error = error
        self._closed = True
        self._wake.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Audio:
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if self._closed:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        piece = self._pieces.popleft()
        self._room.set()
        return piece
