"""The router's whole: pools of stages, pipelines over them, and the health that follows from both."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from omnistage.stage.v1 import stage_pb2
from omnistage.v1 import speech_pb2
from services.router.admission import Admission
from services.router.chunks import ChunkPlan
from services.router.pipelines.speech import SpeechStages
from services.router.replicas import Misfit, PoolContext, StagePool
from services.router.requests import Requests
from services.router.speech_request import SpeechFacts
from stage_runtime.config import Installation, SpeechPipelineSettings
from stage_runtime.errors import StageUnavailable, UnknownModel
from stage_runtime.health import HealthServicer

SPEECH_SERVICE = speech_pb2.DESCRIPTOR.services_by_name["SpeechService"].full_name


@dataclass(slots=True)
class SpeechPipeline:
    """A configured speech pipeline and its counters."""

    name: str
    settings: SpeechPipelineSettings
    pools: dict[str, StagePool]
    admission: Admission
    finished: Counter[str] = field(default_factory=Counter)

    @property
    def serving(self) -> bool:
        """Whether every stage it needs has a replica that takes requests."""
        return all(pool.up_count for pool in self.pools.values())

    def check_up(self) -> None:
        """Raise StageUnavailable for the first stage that has no replica."""
        for pool in self.pools.values():
            pool.choose()

    def facts(self) -> SpeechFacts:
        """What thinker and codec told, also if they are down now; raises StageUnavailable if they never did."""
        return SpeechFacts(self.name, self._described("thinker").speech_thinker, self._described("codec").speech_codec)

    def stages(self) -> SpeechStages:
        """The pipeline's stages for one request; raises StageUnavailable if one was never up."""
        facts = self.facts()
        plan = ChunkPlan(self.settings.first_chunk_frames, self.settings.chunk_frames, self.settings.context_frames)
        return SpeechStages(
            thinker=self.pools["thinker"],
            acoustic=self.pools["acoustic"],
            codec=self.pools["codec"],
            plan=plan,
            samples_per_frame=facts.codec.samples_per_frame,
            codebook_count=facts.codec.codebook_count,
        )

    def _described(self, role: str) -> stage_pb2.DescribeStageResponse:
        pool = self.pools[role]
        if pool.description is None:
            pool.choose()
            raise StageUnavailable(pool.name, "it has not described itself yet")
        return pool.description


class System:
    """Built from the settings alone; knows every pipeline and address before any stage is up."""

    def __init__(self, installation: Installation, health: HealthServicer) -> None:
        self.started_at = time.monotonic()
        self.settings = installation.router
        self.requests = Requests()
        self.health = health
        context = PoolContext(
            router=f"router-{secrets.token_hex(3)}",
            lane=installation.router.lane,
            check_fit=self._check_fit,
            on_change=self._update_health,
        )
        self.pools = {name: StagePool(name, stage, context) for name, stage in installation.stages.items()}
        self.speech = {
            name: SpeechPipeline(
                name,
                settings,
                {role: self.pools[stage] for role, stage in settings.roles().items()},
                Admission(name, max_concurrent=settings.max_concurrent, max_queued=settings.max_queued),
            )
            for name, settings in installation.pipelines.items()
        }
        self._update_health()

    def pipeline(self, model: str) -> SpeechPipeline:
        """The speech pipeline of that name, or the default one for ""; raises UnknownModel."""
        name = model or self.settings.default_model
        if not name and len(self.speech) == 1:
            name = next(iter(self.speech))
        try:
            return self.speech[name]
        except KeyError:
            raise UnknownModel(model, self.speech) from None

    async def run(self) -> None:
        """Keep all pools connected until cancelled."""
        async with asyncio.TaskGroup() as group:
            for pool in self.pools.values():
                group.create_task(pool.run(), name=f"pool-{pool.name}")

    def _update_health(self) -> None:
        for pool in self.pools.values():
            self.health.set(f"stage/{pool.name}", pool.up_count > 0)
        self.health.set(SPEECH_SERVICE, any(pipeline.serving for pipeline in self.speech.values()))

    def _check_fit(self, stage: str, description: stage_pb2.DescribeStageResponse) -> None:
        """Raise Misfit if what a stage tells does not fit the other stages of a pipeline that uses it."""
        for pipeline in self.speech.values():
            told = {role: pool.description for role, pool in pipeline.pools.items()}
            told |= {role: description for role, pool in pipeline.pools.items() if pool.name == stage}
            _check_speech_fit(pipeline.name, pipeline.settings, told)


def _check_speech_fit(
    name: str, settings: SpeechPipelineSettings, told: dict[str, stage_pb2.DescribeStageResponse | None]
) -> None:
    thinker, acoustic, codec = told["thinker"], told["acoustic"], told["codec"]
    if thinker is not None and acoustic is not None:
        for giver, taker, tensor in ((thinker, acoustic, "hidden"), (acoustic, thinker, "codes")):
            given, taken = _spec(giver.outputs, tensor), _spec(taker.inputs, tensor)
            if given != taken:
                raise Misfit(f"pipeline {name!r}: {tensor!r} is {given} on one side and {taken} on the other")
    if codec is None:
        return
    facts = codec.speech_codec
    window = settings.chunk_frames + settings.context_frames
    if settings.context_frames < facts.left_reach_frames:
        raise Misfit(
            f"pipeline {name!r}: context_frames is {settings.context_frames}; the codec needs {facts.left_reach_frames} "
            "for streamed audio to equal a whole decode"
        )
    if window > facts.max_window_frames:
        raise Misfit(
            f"pipeline {name!r}: chunk and context are {window} frames; the codec takes {facts.max_window_frames}"
        )
    if thinker is not None and thinker.speech_thinker.codebook_count != facts.codebook_count:
        raise Misfit(
            f"pipeline {name!r}: the thinker has {thinker.speech_thinker.codebook_count} codes a frame, "
            f"the codec {facts.codebook_count}"
        )


def _spec(specs: Iterable[stage_pb2.TensorSpec], name: str) -> str:
    for spec in specs:
        if spec.name == name:
            return f"{stage_pb2.DataType.Name(spec.dtype)} {list(spec.row_shape)}"
    return "missing"
