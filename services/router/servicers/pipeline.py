"""PipelineService: what the server is made of and how loaded it is."""

from __future__ import annotations

import time
from typing import Any

import grpc.aio

from omnistage.v1 import pipeline_pb2, pipeline_pb2_grpc
from services.router.replicas import Replica, StagePool
from services.router.system import SPEECH_SERVICE, SpeechPipeline, System
from stage_runtime.lane import duration
from stage_runtime.version import VERSION

Context = grpc.aio.ServicerContext[Any, Any]


class PipelineServicer(pipeline_pb2_grpc.PipelineServiceServicer):
    """See pipeline.proto."""

    def __init__(self, system: System) -> None:
        self._system = system

    async def ListPipelines(
        self, request: pipeline_pb2.ListPipelinesRequest, context: Context
    ) -> pipeline_pb2.ListPipelinesResponse:
        """See pipeline.proto."""
        return pipeline_pb2.ListPipelinesResponse(
            pipelines=[_pipeline(pipeline) for pipeline in self._system.speech.values()],
            server_version=VERSION,
            uptime=duration(time.monotonic() - self._system.started_at),
        )

    async def ListStages(
        self, request: pipeline_pb2.ListStagesRequest, context: Context
    ) -> pipeline_pb2.ListStagesResponse:
        """See pipeline.proto."""
        return pipeline_pb2.ListStagesResponse(
            stages=[
                pipeline_pb2.Stage(
                    name=pool.name,
                    kind=pool.settings.kind,
                    replicas=[_replica(replica) for _, replica in sorted(pool.replicas.items())],
                )
                for pool in self._system.pools.values()
            ]
        )


def _pipeline(pipeline: SpeechPipeline) -> pipeline_pb2.Pipeline:
    settings = pipeline.settings
    return pipeline_pb2.Pipeline(
        name=pipeline.name,
        kind=settings.kind,
        service=SPEECH_SERVICE,
        serving=pipeline.serving,
        stages=[_role(role, pool) for role, pool in pipeline.pools.items()],
        in_flight_count=pipeline.admission.active_count,
        queued_count=pipeline.admission.queued_count,
        finished_counts=pipeline.finished,
        limits=pipeline_pb2.PipelineLimits(
            max_concurrent_count=settings.max_concurrent,
            max_queued_count=settings.max_queued,
            max_text_characters=settings.max_text_characters,
            max_frames=settings.max_frames,
        ),
    )


def _role(role: str, pool: StagePool) -> pipeline_pb2.PipelineStage:
    return pipeline_pb2.PipelineStage(role=role, stage=pool.name, up_count=pool.up_count)


def _replica(replica: Replica) -> pipeline_pb2.Replica:
    message = pipeline_pb2.Replica(
        address=replica.address,
        state=replica.shown_state,
        reason=replica.reason,
        in_flight_count=replica.in_flight,
        lost_count=replica.lost_count,
    )
    if (lane := replica.lane) is not None:
        beat = lane.heartbeat
        message.model = lane.description.model
        message.model_fingerprint = lane.description.model_fingerprint
        message.load.CopyFrom(
            pipeline_pb2.ReplicaLoad(
                step_count=beat.step_count,
                row_count=beat.row_count,
                queued_count=beat.queued_count,
                active_count=beat.active_count,
                capacity_count=lane.description.capacity_count,
                busy=beat.busy,
                aborted_count=beat.aborted_count,
            )
        )
    return message
