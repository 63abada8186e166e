"""What the server is made of and how loaded it is, in Python's own types."""

from __future__ import annotations

from dataclasses import dataclass

from omnistage.v1 import pipeline_pb2


@dataclass(frozen=True, slots=True)
class Server:
    """The router: version of the omnistage distribution that it runs, and time since its start."""

    version: str
    uptime_s: float


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """A stage in its role within a pipeline; `up_count` of its replicas take requests."""

    role: str
    stage: str
    up_count: int


@dataclass(frozen=True, slots=True)
class PipelineLimits:
    """Limits that requests are checked against: most worked on at once, most waiting, longest text, highest max_frames."""

    max_concurrent_count: int
    max_queued_count: int
    max_text_characters: int
    max_frames: int


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A pipeline. `name` is what requests call the model; `finished_counts` is by gRPC status name, since the router's start."""

    name: str
    kind: str
    service: str
    serving: bool
    stages: tuple[PipelineStage, ...]
    in_flight_count: int
    queued_count: int
    finished_counts: dict[str, int]
    limits: PipelineLimits


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """Load of a replica by its own last report; counts of steps, rows and aborts, and the time in steps, are since its start."""

    step_count: int
    row_count: int
    queued_count: int
    active_count: int
    capacity_count: int
    busy_s: float
    aborted_count: int

    @property
    def mean_batch_size(self) -> float:
        """Mean number of requests in an engine step; 0 before the first step."""
        return self.row_count / self.step_count if self.step_count else 0.0


@dataclass(frozen=True, slots=True)
class Replica:
    """A process that serves a stage. `state` is "connecting", "up", "draining", "lost" or "rejected"; `reason` is why not "up"."""

    address: str
    state: str
    reason: str
    model: str
    model_fingerprint: str
    in_flight_count: int
    lost_count: int
    load: ReplicaLoad


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage, what it runs, and its replicas by address."""

    name: str
    kind: str
    replicas: tuple[Replica, ...]


def server(response: pipeline_pb2.ListPipelinesResponse) -> Server:
    """What ListPipelines says of the server itself."""
    return Server(response.server_version, response.uptime.ToTimedelta().total_seconds())


def pipelines(response: pipeline_pb2.ListPipelinesResponse) -> list[Pipeline]:
    """The pipelines that ListPipelines tells of."""
    return [_pipeline(pipeline) for pipeline in response.pipelines]


def stages(response: pipeline_pb2.ListStagesResponse) -> list[Stage]:
    """The answer of ListStages."""
    return [Stage(stage.name, stage.kind, tuple(map(_replica, stage.replicas))) for stage in response.stages]


def _pipeline(pipeline: pipeline_pb2.Pipeline) -> Pipeline:
    limits = pipeline.limits
    return Pipeline(
        name=pipeline.name,
        kind=pipeline.kind,
        service=pipeline.service,
        serving=pipeline.serving,
        stages=tuple(PipelineStage(stage.role, stage.stage, stage.up_count) for stage in pipeline.stages),
        in_flight_count=pipeline.in_flight_count,
        queued_count=pipeline.queued_count,
        finished_counts=dict(pipeline.finished_counts),
        limits=PipelineLimits(
            limits.max_concurrent_count, limits.max_queued_count, limits.max_text_characters, limits.max_frames
        ),
    )


def _replica(replica: pipeline_pb2.Replica) -> Replica:
    load = replica.load
    return Replica(
        address=replica.address,
        state=_state(replica.state),
        reason=replica.reason,
        model=replica.model,
        model_fingerprint=replica.model_fingerprint,
        in_flight_count=replica.in_flight_count,
        lost_count=replica.lost_count,
        load=ReplicaLoad(
            step_count=load.step_count,
            row_count=load.row_count,
            queued_count=load.queued_count,
            active_count=load.active_count,
            capacity_count=load.capacity_count,
            busy_s=load.busy.ToTimedelta().total_seconds(),
            aborted_count=load.aborted_count,
        ),
    )


def _state(state: pipeline_pb2.ReplicaState.ValueType) -> str:
    """The state in lower case; the number of one that this client does not know."""
    if state not in pipeline_pb2.ReplicaState.values():
        return str(state)
    return pipeline_pb2.ReplicaState.Name(state).removeprefix("REPLICA_STATE_").lower()
