"""grpc.health.v1 with Check, Watch and List, for grpc.aio.

The servicer that grpcio-health-checking brings lacks List, starts with "" = SERVING, and can only be set from a coroutine; and its
open Watch streams hold up `Server.stop` for the whole grace period.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVICE_NAME = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name

_Context = grpc.aio.ServicerContext[Any, Any]
_Response = health_pb2.HealthCheckResponse
# The type stubs are older than List.
_ListResponse: Any = health_pb2.HealthListResponse  # type: ignore[attr-defined]


class HealthServicer(health_pb2_grpc.HealthServicer):
    """Health of this process (name "") and of whatever else it names. Every name starts NOT_SERVING.

    All methods but the calls are synchronous and belong to the thread of the event loop; they may be used before there is one.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._serving: dict[str, bool] = {"": False}
        self._watchers: dict[str, set[asyncio.Event]] = {}
        self._shut_down = False
        self._closed = False
        self.add(*names)

    def add(self, *names: str) -> None:
        """Make names known, NOT_SERVING; those that are known already keep their state."""
        for name in names:
            if name not in self._serving:
                self._serving[name] = False
                self._wake(name)

    def set(self, name: str, serving: bool) -> None:  # noqa: FBT001 - a setter
        """Say whether `name` serves, and tell its watchers. Without effect on the state after `shutdown`."""
        serving = serving and not self._shut_down
        if self._serving.get(name) != serving:
            self._serving[name] = serving
            self._wake(name)

    def serving(self, name: str = "") -> bool:
        """Whether `name` is known and SERVING."""
        return self._serving.get(name, False)

    def shutdown(self) -> None:
        """Set every name NOT_SERVING for good: names that are set or added later are NOT_SERVING too."""
        self._shut_down = True
        for name in self._serving:
            self.set(name, serving=False)

    def close(self) -> None:
        """`shutdown`, and end the Watch streams once they told so; otherwise they would keep the server from stopping."""
        self.shutdown()
        self._closed = True
        for name in self._watchers:
            self._wake(name)

    async def Check(self, request: health_pb2.HealthCheckRequest, context: _Context) -> _Response:  # noqa: N802
        """State of one name; NOT_FOUND if it is unknown."""
        if request.service not in self._serving:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no health of {request.service[:200]!r} is kept here")
        return _Response(status=self._status(request.service))

    async def List(self, request: Message, context: _Context) -> Message:  # noqa: N802
        """State of every name."""
        del request, context
        statuses = {name: _Response(status=self._status(name)) for name in self._serving}
        response: Message = _ListResponse(statuses=statuses)
        return response

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: _Context) -> None:  # noqa: N802
        """State of one name now and after every change; SERVICE_UNKNOWN while it is unknown.

        A reader that is slow misses states in between, never the last.
        """
        changed = asyncio.Event()
        watchers = self._watchers.setdefault(request.service, set())
        watchers.add(changed)
        told = None
        try:
            while True:
                changed.clear()
                status = self._status(request.service)
                if status != told:
                    await context.write(_Response(status=status))
                    told = status
                elif self._closed:
                    return
                else:
                    await changed.wait()
        finally:
            watchers.discard(changed)
            if not watchers and self._watchers.get(request.service) is watchers:
                del self._watchers[request.service]

    def _status(self, name: str) -> int:
        serving = self._serving.get(name)
        if serving is None:
            return _Response.SERVICE_UNKNOWN
        return _Response.SERVING if serving else _Response.NOT_SERVING

    def _wake(self, name: str) -> None:
        for changed in self._watchers.get(name, ()):
            changed.set()
