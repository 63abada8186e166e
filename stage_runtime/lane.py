"""What both ends of the lane share: protocol version, message building, and the outbox with its single writer.

The lane is StageService.Run: one stream for all requests between a router and a stage replica.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from google.protobuf.duration_pb2 import Duration

from omnistage.stage.v1 import stage_pb2
from stage_runtime.errors import ProtocolMismatch
from stage_runtime.tensors import Rows

M = TypeVar("M")

PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 0

# A step over this is sent as several messages: large messages cost page faults and delay heartbeats behind them.
STEP_BYTES = 4 * 2**20


def protocol_version() -> stage_pb2.ProtocolVersion:
    """The version that this release speaks."""
    return stage_pb2.ProtocolVersion(major=PROTOCOL_MAJOR, minor=PROTOCOL_MINOR)


def check_protocol(theirs: stage_pb2.ProtocolVersion) -> None:
    """Raise ProtocolMismatch if the peer's major version is another."""
    if theirs.major != PROTOCOL_MAJOR:
        raise ProtocolMismatch(f"{PROTOCOL_MAJOR}.{PROTOCOL_MINOR}", f"{theirs.major}.{theirs.minor}")


def duration(seconds: float) -> Duration:
    """Seconds as a message; negative ones as 0."""
    message = Duration()
    message.FromNanoseconds(max(0, round(seconds * 1e9)))
    return message


def seconds(message: Duration) -> float:
    """A message as seconds."""
    return message.seconds + message.nanos / 1e9


@dataclass(frozen=True, slots=True)
class StepPart:
    """What one Step message carries."""

    ids: Sequence[int]
    indices: Sequence[int]
    tensors: Mapping[str, Rows]
    contexts: Sequence[int] = ()

    def split(self) -> list[StepPart]:
        """This part, or several with disjoint ids where one would exceed STEP_BYTES."""
        if sum(len(rows.data) for rows in self.tensors.values()) <= STEP_BYTES or len(self.ids) == 1:
            return [self]
        half = len(self.ids) // 2
        parts: list[StepPart] = []
        for places in (range(half), range(half, len(self.ids))):
            tensors = {name: rows.take(places, len(self.ids)) for name, rows in self.tensors.items()}
            chosen = slice(places.start, places.stop)
            parts += StepPart(self.ids[chosen], self.indices[chosen], tensors, self.contexts[chosen]).split()
        return parts

    def write_to(self, step: stage_pb2.Step) -> None:
        """Fill an empty message, which may be a field of another: a message put into another is copied, rows and all."""
        step.ids.extend(self.ids)
        step.indices.extend(self.indices)
        step.context_counts.extend(self.contexts)
        for name, rows in self.tensors.items():
            rows.write_to(step.tensors.add(), name)


class Outbox(Generic[M]):
    """Messages waiting for the one writer of a stream (two writers break a gRPC stream).

    Unbounded by itself: what may be in it is bounded by the credit of each request.
    """

    def __init__(self) -> None:
        self._messages: deque[M] = deque()
        self._some = asyncio.Event()

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, *messages: M) -> None:
        """Append messages; call on the loop's thread."""
        self._messages.extend(messages)
        self._some.set()

    async def write_to(self, write: Callable[[M], Awaitable[None]]) -> None:
        """Write messages for ever, in order."""
        while True:
            await self._some.wait()
            while self._messages:
                await write(self._messages.popleft())
            self._some.clear()
