"""Replicas of a stage, and the pool that chooses among them.

Each replica is one coroutine: connect, be UP while its lane lives, wait with backoff and jitter, again. A replica whose lane breaks is
evicted at that moment: the lane fails the requests bound to it, the pool no longer chooses it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc.aio
from grpc_status import rpc_status

from omnistage.stage.v1 import stage_pb2
from omnistage.v1 import pipeline_pb2
from services.router.resolver import resolve
from stage_runtime.config import LaneSettings, StageSettings
from stage_runtime.errors import Draining, OmnistageError, QueueFull, StageUnavailable, from_status
from stage_runtime.grpc_options import channel_options
from stage_runtime.lane_client import CallRequest, Lane, LaneLost, StageCall
from stage_runtime.logs import get_logger

_log = get_logger(__name__)

State = pipeline_pb2.ReplicaState


class Misfit(Exception):
    """The replica answers but does not fit; the message says why."""


@dataclass(frozen=True, slots=True)
class PoolContext:
    """What all pools of a router share. `check_fit` raises Misfit if a description does not fit the stage's pipelines."""

    router: str
    lane: LaneSettings
    check_fit: Callable[[str, stage_pb2.DescribeStageResponse], None]
    on_change: Callable[[], None]


@dataclass(slots=True)
class Replica:
    """One replica, as the router sees it."""

    address: str
    state: State.ValueType = State.REPLICA_STATE_CONNECTING
    reason: str = "not reached yet"
    lost_count: int = 0
    last_used: int = 0
    leaving: bool = False
    lane: Lane | None = None
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def accepting(self) -> bool:
        """Whether it can be chosen for new requests."""
        return self.lane is not None and not self.leaving and not self.lane.draining

    @property
    def in_flight(self) -> int:
        """Requests of this router that are bound to it."""
        return 0 if self.lane is None else self.lane.in_flight

    @property
    def shown_state(self) -> State.ValueType:
        """Its state, draining included."""
        return State.REPLICA_STATE_DRAINING if self.lane is not None and not self.accepting else self.state


class StagePool:
    """All replicas of one stage."""

    def __init__(self, name: str, settings: StageSettings, context: PoolContext) -> None:
        self.name = name
        self.settings = settings
        self.replicas: dict[str, Replica] = {}
        self.description: stage_pb2.DescribeStageResponse | None = None
        self._context = context
        self._uses = 0

    async def run(self) -> None:
        """Keep the replicas connected until cancelled."""
        try:
            while True:
                self._update(await resolve(self.settings.addresses, known=self.replicas))
                await asyncio.sleep(self._context.lane.resolve_interval_s)
        finally:
            tasks = [replica.task for replica in self.replicas.values() if replica.task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def up_count(self) -> int:
        """Replicas that take requests."""
        return sum(replica.accepting for replica in self.replicas.values())

    def choose(self, exclude: Collection[str] = ()) -> Replica:
        """The replica with the least outstanding work; raises StageUnavailable if none takes requests."""
        choices = [
            replica for replica in self.replicas.values() if replica.accepting and replica.address not in exclude
        ]
        if not choices:
            raise StageUnavailable(self.name, self._why_none())
        chosen = min(choices, key=lambda replica: (replica.in_flight, replica.last_used))
        self._uses += 1
        chosen.last_used = self._uses
        return chosen

    @asynccontextmanager
    async def place(self, request: CallRequest) -> AsyncIterator[tuple[StageCall, Lane]]:
        """Submit a request to a replica and wait until that has admitted it; leaving early aborts it there.

        A replica that refuses because it drains or its queue is full did not begin: the next one is tried, each once.
        """
        refused: list[str] = []
        while True:
            replica = self.choose(refused)
            lane = replica.lane
            if lane is None:
                raise StageUnavailable(self.name, self._why_none())
            async with lane.call(request) as call:
                try:
                    await call.wait_accepted()
                except (Draining, QueueFull):
                    refused.append(replica.address)
                    if any(other.accepting and other.address not in refused for other in self.replicas.values()):
                        continue
                    raise
                yield call, lane
                return

    def _why_none(self) -> str:
        if not self.replicas:
            return "no address is known"
        return "; ".join(
            f"{replica.address}: {replica.reason or 'draining'}" for replica in list(self.replicas.values())[:4]
        )

    def _update(self, addresses: Collection[str]) -> None:
        for address in addresses:
            replica = self.replicas.get(address)
            if replica is None:
                replica = self.replicas[address] = Replica(address)
                replica.task = asyncio.create_task(self._keep(replica), name=f"replica-{self.name}-{address}")
            replica.leaving = False
        for address, replica in list(self.replicas.items()):
            if address not in addresses:
                replica.leaving = True
                if replica.in_flight == 0:
                    if replica.task is not None:
                        replica.task.cancel()
                    del self.replicas[address]
                    _log.info("replica_removed", stage=self.name, replica=address)
        self._context.on_change()

    async def _keep(self, replica: Replica) -> None:
        settings = self._context.lane
        backoff_s = settings.backoff_initial_s
        while True:
            lost_before = replica.lost_count
            try:
                await self._serve(replica)
            except (grpc.aio.AioRpcError, OmnistageError, LaneLost, Misfit, TimeoutError) as error:
                self._down(replica, error)
                if replica.lost_count > lost_before:
                    backoff_s = settings.backoff_initial_s
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))  # noqa: S311  # jitter, no secret
            backoff_s = min(backoff_s * 2, settings.backoff_max_s)

    async def _serve(self, replica: Replica) -> None:
        """Connect, then carry the lane until it breaks."""
        options = channel_options(self.settings.max_message_bytes, local_subchannel_pool=True)
        async with grpc.aio.insecure_channel(replica.address, options=options) as channel:
            lane = Lane(
                channel,
                self._context.lane,
                stage=self.name,
                address=replica.address,
                router=self._context.router,
                on_change=self._context.on_change,
            )
            description = await lane.connect()
            self._check(description, replica)
            self.description = description
            replica.lane, replica.state, replica.reason = lane, State.REPLICA_STATE_UP, ""
            _log.info("replica_up", stage=self.name, replica=replica.address)
            self._context.on_change()
            try:
                await lane.run()
            except LaneLost as error:
                self._down(replica, error)  # at once: closing the channel takes its time
                raise
            finally:
                replica.lane = None
                self._context.on_change()

    def _check(self, description: stage_pb2.DescribeStageResponse, replica: Replica) -> None:
        if description.kind != self.settings.kind:
            raise Misfit(f"it is a {description.kind!r}, the settings say {self.settings.kind!r}")
        if self.description is not None and any(
            other.accepting for other in self.replicas.values() if other is not replica
        ):
            ours, theirs = self.description.model_fingerprint, description.model_fingerprint
            if ours != theirs:
                raise Misfit(f"it loaded model {theirs}, the other replicas {ours}")
        self._context.check_fit(self.name, description)

    def _down(self, replica: Replica, error: Exception) -> None:
        was_up = replica.state == State.REPLICA_STATE_UP
        reason = _reason(error)
        if was_up:
            replica.lost_count += 1
            _log.warning("replica_lost", stage=self.name, replica=replica.address, reason=reason)
        elif reason != replica.reason:
            _log.info("replica_not_up", stage=self.name, replica=replica.address, reason=reason)
        if isinstance(error, Misfit):
            replica.state = State.REPLICA_STATE_REJECTED
        elif was_up:
            replica.state = State.REPLICA_STATE_LOST
        elif replica.state == State.REPLICA_STATE_REJECTED:
            replica.state = State.REPLICA_STATE_CONNECTING
        replica.reason = reason


def _reason(error: Exception) -> str:
    match error:
        case grpc.aio.AioRpcError():
            return status_reason(error)
        case TimeoutError():
            return "did not answer in time"
        case _:
            return str(error)


def status_reason(error: grpc.aio.AioRpcError) -> str:
    """One line for a failed call: our own message where the stage sent one, else the code and gRPC's details."""
    status = rpc_status.from_call(error)  # type: ignore[arg-type]  # takes AioRpcError too, its stubs do not know
    if status is not None:
        return str(from_status(status))
    return f"{error.code().name}: {(error.details() or 'no details')[:200]}"
