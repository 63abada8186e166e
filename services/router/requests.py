"""The life of a request in the router: its id, its label, its deadline, its place in line, and how it ended."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import grpc

from services.router.admission import Admission
from stage_runtime import logs
from stage_runtime.errors import (
    DeadlineExceeded,
    Draining,
    InternalError,
    OmnistageError,
    RequestIdInUse,
)

_log = logs.get_logger(__name__)


@dataclass(slots=True)
class Ticket:
    """A request under way. `deadline` is on the monotonic clock; `reached` says what it is doing, for a deadline's message."""

    request_id: str
    arrived_at: float
    deadline: float | None
    reached: str = "waiting for its turn"
    drained: bool = False
    timeout: asyncio.Timeout | None = None


class Requests:
    """All requests of a router process."""

    def __init__(self) -> None:
        self._prefix = secrets.token_hex(3)
        self._count = 0
        self._labels: set[str] = set()
        self._open: dict[str, Ticket] = {}
        self._draining = False

    @property
    def in_flight_count(self) -> int:
        """Requests under way, queued ones included."""
        return len(self._open)

    def new_id(self) -> str:
        """A request id: unique for this start of the router, then a counter."""
        self._count += 1
        return f"{self._prefix}-{self._count}"

    @asynccontextmanager
    async def track(
        self, admission: Admission, finished: Counter[str], *, label: str, time_left_s: float | None
    ) -> AsyncIterator[Ticket]:
        """Hold a request from its acceptance to its end, whatever that is.

        Raises Draining, RequestIdInUse or QueueFull before anything is done; DeadlineExceeded or Draining when time is up; every
        other error of the body as it is, with the request id put in.
        """
        arrived = time.monotonic()
        deadline = None if time_left_s is None else arrived + time_left_s
        ticket = Ticket(self.new_id(), arrived, deadline)
        with _counted(finished, ticket), logs.bound_request(ticket.request_id), self._registered(ticket, label):
            try:
                async with asyncio.timeout(time_left_s) as ticket.timeout, admission.slot():
                    ticket.reached = "being worked on"
                    yield ticket
            except TimeoutError:
                if ticket.drained:
                    raise Draining("the router") from None
                raise DeadlineExceeded(f"the request was {ticket.reached}") from None

    @contextmanager
    def _registered(self, ticket: Ticket, label: str) -> Iterator[None]:
        if self._draining:
            raise Draining("the router")
        if label and label in self._labels:
            raise RequestIdInUse(label)
        if label:
            self._labels.add(label)
        self._open[ticket.request_id] = ticket
        try:
            yield
        finally:
            self._labels.discard(label)
            del self._open[ticket.request_id]

    def refuse_new(self) -> None:
        """Refuse all requests from now on."""
        self._draining = True

    async def drain(self, grace_s: float) -> None:
        """Wait for the requests under way; end those that are left after `grace_s` with Draining."""
        self.refuse_new()
        until = time.monotonic() + grace_s
        while self._open and time.monotonic() < until:  # noqa: ASYNC110  # an event for each end would serve nobody else
            await asyncio.sleep(0.02)
        for ticket in self._open.values():
            ticket.drained = True
            if ticket.timeout is not None and not ticket.timeout.expired():
                ticket.timeout.reschedule(asyncio.get_running_loop().time())


@contextmanager
def _counted(finished: Counter[str], ticket: Ticket) -> Iterator[None]:
    """Count how a request ended, and see that its error names it."""
    code = grpc.StatusCode.OK
    try:
        yield
    except asyncio.CancelledError:
        code = grpc.StatusCode.CANCELLED
        raise
    except BaseExceptionGroup as group:
        error = _first(group, ticket)
        code = error.status_code
        raise error from group
    except OmnistageError as error:
        code = error.status_code
        raise error.with_request(ticket.request_id) from error.__cause__
    except Exception:
        code = grpc.StatusCode.INTERNAL
        raise
    finally:
        finished[code.name] += 1
        _log.info(
            "request_ended",
            request_id=ticket.request_id,
            code=code.name,
            seconds=round(time.monotonic() - ticket.arrived_at, 3),
        )


def _first(group: BaseExceptionGroup[BaseException], ticket: Ticket) -> OmnistageError:
    """The first error of ours in a group; InternalError if there is none."""
    ours, _ = group.split(OmnistageError)
    while ours is not None:
        first = ours.exceptions[0]
        if isinstance(first, OmnistageError):
            return first.with_request(ticket.request_id)
        ours = first if isinstance(first, BaseExceptionGroup) else None
    _log.error("request_bug", request_id=ticket.request_id, exc_info=group)
    return InternalError(ticket.request_id)
