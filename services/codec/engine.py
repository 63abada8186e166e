"""Engine of the codec stage: windows of codes in, the samples of their new frames out.

Samples depend on the window alone. A router that gives each window enough left context (`left_reach_frames`) gets the samples of a
decode in one piece; the engine keeps nothing of the audio between steps, so a request may go on at any replica.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from pydantic import ValidationError

from omnistage.stage.v1 import stage_pb2
from services.codec.model import PREFIX, CodecDecoder, CodecWeights, left_reach_frames
from services.codec.settings import CodecSettings
from services.codec.windows import Batching, Window, decode_windows, describe_bad_codes, inspect_codes
from services.voxtral.checkpoint import Checkpoint, open_checkpoint
from services.voxtral.params import SPECIAL_CODES, VoxtralParams
from stage_runtime.config import ConfigError, StageSettings, describe
from stage_runtime.engine import Admission, Engine, Next, StageDescription, StageRequest, StepResult, Work
from stage_runtime.errors import CheckpointDamaged, FieldViolation, InvalidRequest, OmnistageError, StageProtocolError
from stage_runtime.tensors import DType, TensorSpec
from stage_runtime.torch_tensors import from_torch, to_torch

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# Window lengths decoded once at load: first use of a kernel or library costs time that no request should pay.
WARM_UP_FRAMES = (5, 50)


@dataclass(frozen=True, slots=True)
class CodecRequest:
    """What an admitted request announced: the most new frames and the most frames of left context of a window."""

    number: int
    chunk_frames: int
    context_frames: int


class CodecEngine:
    """Engine of kind voxtral.codec. Input `codes`: rows [context + new, K] int32. Output `pcm`: new * samples_per_frame float32."""

    def __init__(self, stage: StageSettings, settings: CodecSettings) -> None:
        self._stage = stage
        self._settings = settings
        self._device = torch.device(stage.device)
        self._dtype = _DTYPES[stage.dtype]
        self._batching = Batching(stage.batch_invariant, settings.max_batch, settings.max_batch_frames)
        self._numbers = itertools.count()
        self._checkpoint: Checkpoint | None = None
        self._decoder: CodecDecoder | None = None

    def load(self) -> None:
        """Read and prepare the weights, warm up. Raises CheckpointDamaged."""
        self._checkpoint = open_checkpoint(self._stage.model)
        self._load_weights()

    def describe(self) -> StageDescription:
        """See Engine. The run dtype is part of the fingerprint: replicas of another dtype make other samples."""
        checkpoint = self._loaded_checkpoint()
        params = checkpoint.params
        return StageDescription(
            kind="voxtral.codec",
            model=checkpoint.name,
            fingerprint=f"{checkpoint.fingerprint}-{self._stage.dtype}",
            capacity=self._settings.max_sequences,
            inputs=(_input_spec(params),),
            outputs=(TensorSpec("pcm", DType.F32, (), ragged=True),),
            facts=stage_pb2.SpeechCodecFacts(
                sample_rate_hz=params.codec.sampling_rate,
                samples_per_frame=params.codec.samples_per_frame,
                left_reach_frames=left_reach_frames(params.codec),
                max_window_frames=self._settings.max_window_frames,
                codebook_count=params.codebook_count,
            ),
        )

    def admit(self, request: StageRequest) -> Admission[CodecRequest]:
        """Check the announced chunk plan. Nothing is reserved. Raises InvalidRequest."""
        params = request.params
        if not isinstance(params, stage_pb2.SpeechCodecParams):
            raise InvalidRequest(
                [FieldViolation("params", f"is {params.DESCRIPTOR.name}; must be SpeechCodecParams", "WRONG_TYPE")]
            )
        violations = self._check_plan(params)
        if request.tensors:
            violations.append(
                FieldViolation("tensors", f"has {sorted(request.tensors)}; this stage takes none here", "UNEXPECTED")
            )
        if violations:
            raise InvalidRequest(violations)
        state = CodecRequest(next(self._numbers), params.chunk_frames, params.context_frames)
        return Admission(state, needs_input=True)

    def batch_key(self, state: CodecRequest) -> Hashable:
        """With batch_invariant each window has a step of its own: decoding them one after the other would only delay the first."""
        return state.number if self._batching.alone else None

    @torch.inference_mode()
    def step(self, works: Sequence[Work[CodecRequest]]) -> StepResult:
        """Samples of each work's new frames; from the first END_AUDIO on there are none. Codes that are no real ones fail their request."""
        errors: dict[int, OmnistageError] = {
            place: StageProtocolError(fault) for place, work in enumerate(works) if (fault := self._misfit(work))
        }
        fitting = [(place, work) for place, work in enumerate(works) if place not in errors]
        codes = {place: to_torch(work.inputs["codes"]).long() for place, work in fitting}
        params = self._loaded_decoder().params
        windows: list[Window] = []
        for (place, rows), facts in zip(codes.items(), inspect_codes(list(codes.values()), params), strict=True):
            if facts.bad_frame is not None:
                errors[place] = StageProtocolError(describe_bad_codes(rows, facts.bad_frame, params))
                continue
            windows.append(Window(rows[: facts.frames], works[place].context_count))
        waves = decode_windows(self._loaded_decoder(), windows, self._batching)
        # The only wait for the device: all samples in one copy.
        samples = torch.cat(waves) if waves else torch.empty(0)
        return StepResult(
            next=[Next.FAILED if place in errors else Next.WAIT for place in range(len(works))],
            tensors={"pcm": from_torch(samples, row_counts=[len(wave) for wave in waves])},
            errors=errors,
        )

    def release(self, state: CodecRequest) -> None:
        """Nothing to give back."""

    def recover(self) -> None:
        """Give unused device memory back to the driver."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def sleep(self, level: int) -> None:
        """1: weights leave the accelerator; on a CPU there is none to leave. 2: they leave memory."""
        if level >= 2 or self._device.type != "cpu":
            self._decoder = None
            self.recover()

    def wake(self) -> None:
        """Read the weights again, if `sleep` dropped them. Raises CheckpointDamaged if they are no longer the same."""
        if self._decoder is None:
            if open_checkpoint(self._stage.model).fingerprint != self._loaded_checkpoint().fingerprint:
                raise CheckpointDamaged(str(self._stage.model), "changed while the stage slept; restart the stage")
            self._load_weights()

    @torch.inference_mode()
    def _load_weights(self) -> None:
        checkpoint = self._loaded_checkpoint()
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        tensors = checkpoint.load(PREFIX, torch.float32, self._device)
        decoder = CodecDecoder.of(
            CodecWeights.from_tensors(tensors, checkpoint.params, self._dtype), checkpoint.params.codec
        )
        for frames in WARM_UP_FRAMES:
            if frames <= self._settings.max_window_frames:
                codes = torch.full((frames, checkpoint.params.codebook_count), SPECIAL_CODES)
                decode_windows(decoder, [Window(codes, context=0)], self._batching)
        self._decoder = decoder

    def _check_plan(self, params: stage_pb2.SpeechCodecParams) -> list[FieldViolation]:
        violations: list[FieldViolation] = []
        if not 1 <= params.first_chunk_frames <= params.chunk_frames:
            violations.append(
                FieldViolation(
                    "first_chunk_frames",
                    f"is {params.first_chunk_frames}; must be 1 to chunk_frames, which is {params.chunk_frames}",
                    "OUT_OF_RANGE",
                )
            )
        window, limit = params.chunk_frames + params.context_frames, self._settings.max_window_frames
        if window > limit:
            violations.append(
                FieldViolation(
                    "chunk_frames",
                    f"makes windows of {window} frames with context_frames {params.context_frames}; must be at most {limit}, "
                    "this codec's max_window_frames",
                    "OUT_OF_RANGE",
                )
            )
        return violations

    def _misfit(self, work: Work[CodecRequest]) -> str:
        """Why the shape of a window is not what its request announced; empty if it is."""
        rows, context, plan = work.inputs["codes"], work.context_count, work.state
        spec = _input_spec(self._loaded_checkpoint().params)
        if rows.dtype is not spec.dtype or rows.row_shape != spec.row_shape:
            return (
                f"codes are {rows.dtype.name} {list(rows.row_shape)} a frame; this codec takes "
                f"{spec.dtype.name} {list(spec.row_shape)}"
            )
        if not 0 <= context < rows.row_count:
            return f"a window of {rows.row_count} frames says that {context} are context; at least one must be new"
        new = rows.row_count - context
        if new > plan.chunk_frames or context > plan.context_frames:
            return (
                f"a window has {new} new frames after {context} of context; announced were at most {plan.chunk_frames} "
                f"after {plan.context_frames}"
            )
        return ""

    def _loaded_checkpoint(self) -> Checkpoint:
        assert self._checkpoint is not None, "the engine was not loaded"
        return self._checkpoint

    def _loaded_decoder(self) -> CodecDecoder:
        assert self._decoder is not None, "the engine was not loaded, or sleeps"
        return self._decoder


def _input_spec(params: VoxtralParams) -> TensorSpec:
    return TensorSpec("codes", DType.I32, (params.codebook_count,), ragged=True)


def create_engine(settings: StageSettings) -> Engine[CodecRequest]:
    """The engine of a stage; raises ConfigError if its `engine` settings are faulty."""
    try:
        own = CodecSettings.model_validate(settings.engine)
    except ValidationError as error:
        raise ConfigError(f"engine settings of {settings.kind}: {describe(error)}") from error
    return CodecEngine(settings, own)
