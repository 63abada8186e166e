"""Engine of the acoustic stage: admits requests, makes one frame of codes from each hidden state.

A frame depends on (hidden state, cfg_alpha, seed, frame index, whether END_AUDIO is allowed) alone; the engine keeps nothing between
steps, so a request may go on at any replica.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from pydantic import ValidationError

from omnistage.stage.v1 import stage_pb2
from services.acoustic.decoder import FrameDecoder, make_decoder
from services.acoustic.model import AcousticHead, AcousticWeights, FrameInputs
from services.acoustic.model.weights import PREFIX
from services.acoustic.settings import AcousticSettings
from services.voxtral.checkpoint import Checkpoint, open_checkpoint
from stage_runtime.config import ConfigError, StageSettings, describe
from stage_runtime.engine import Admission, Engine, Next, StageDescription, StageRequest, StepResult, Work
from stage_runtime.errors import CheckpointDamaged, FieldViolation, InvalidRequest, NonFiniteOutput, OmnistageError
from stage_runtime.logs import get_logger
from stage_runtime.noise import normals
from stage_runtime.tensors import DType, Rows, TensorSpec, concatenate, nonfinite_requests, rows_from_numpy
from stage_runtime.torch_tensors import to_torch, wire_type

_log = get_logger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class AcousticRequest:
    """What an admitted request asks for."""

    cfg_alpha: float
    seed: int
    min_frames: int


class AcousticEngine:
    """Engine of kind voxtral.acoustic. Input `hidden`: a row [D] of the run dtype. Output `codes`: a row [K], int32."""

    def __init__(self, stage: StageSettings, settings: AcousticSettings) -> None:
        self._stage = stage
        self._settings = settings
        self._device = torch.device(stage.device)
        self._dtype = _DTYPES[stage.dtype]
        self._checkpoint: Checkpoint | None = None
        self._decoder: FrameDecoder | None = None

    def load(self) -> None:
        """Read the weights, choose row counts, warm up, capture graphs. Raises CheckpointDamaged."""
        self._checkpoint = open_checkpoint(self._stage.model)
        _warn_of(self._checkpoint)
        self._load_weights()

    def describe(self) -> StageDescription:
        """See Engine."""
        checkpoint = self._loaded_checkpoint()
        params = checkpoint.params
        return StageDescription(
            kind="voxtral.acoustic",
            model=checkpoint.name,
            fingerprint=checkpoint.fingerprint,
            capacity=self._settings.capacity,
            inputs=(TensorSpec("hidden", wire_type(self._dtype), (params.acoustic.dim,)),),
            outputs=(TensorSpec("codes", DType.I32, (params.codebook_count,)),),
        )

    def admit(self, request: StageRequest) -> Admission[AcousticRequest]:
        """Check the params. Nothing is reserved: a request has no state. Raises InvalidRequest."""
        params = request.params
        if not isinstance(params, stage_pb2.SpeechAcousticParams):
            raise InvalidRequest(
                [FieldViolation("params", f"is {params.DESCRIPTOR.name}; must be SpeechAcousticParams", "WRONG_TYPE")]
            )
        violations: list[FieldViolation] = []
        if not math.isfinite(params.cfg_alpha):
            violations.append(
                FieldViolation(
                    "cfg_alpha", f"is {params.cfg_alpha}; must be a finite number, such as 1.2", "NOT_FINITE"
                )
            )
        if request.tensors:
            violations.append(
                FieldViolation("tensors", f"has {sorted(request.tensors)}; this stage takes none here", "UNEXPECTED")
            )
        if violations:
            raise InvalidRequest(violations)
        state = AcousticRequest(params.cfg_alpha, params.seed, params.min_frames)
        return Admission(state, needs_input=True)

    def batch_key(self, state: AcousticRequest) -> None:
        """All requests share steps."""

    @torch.inference_mode()
    def step(self, works: Sequence[Work[AcousticRequest]]) -> StepResult:
        """One frame for each work. A NaN or infinity in a row's hidden state or velocities fails that row alone."""
        rows = concatenate([work.inputs["hidden"] for work in works])
        errors: dict[int, OmnistageError] = {
            place: NonFiniteOutput("hidden", works[place].index) for place in nonfinite_requests(rows, len(works))
        }
        inputs = self._inputs(works, rows, faulty=list(errors))
        frames = self._loaded_decoder()(inputs)
        # The only wait for the device: codes and flags in one copy.
        packed = torch.cat([frames.codes, frames.finite.int()[:, None]], dim=1).cpu().numpy()
        for place, work in enumerate(works):
            if not packed[place, -1]:
                errors.setdefault(place, NonFiniteOutput("velocity", work.index))
        good = [place for place in range(len(works)) if place not in errors]
        return StepResult(
            next=[Next.FAILED if place in errors else Next.WAIT for place in range(len(works))],
            tensors={"codes": rows_from_numpy(packed[good, :-1])},
            errors=errors,
        )

    def release(self, state: AcousticRequest) -> None:
        """Nothing to give back."""

    def recover(self) -> None:
        """Give unused device memory back to the driver."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def sleep(self, level: int) -> None:
        """1: weights and graphs leave the accelerator; on a CPU there is none to leave. 2: they leave memory."""
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
        tensors = checkpoint.load(PREFIX, self._dtype, self._device)
        head = AcousticHead.of(AcousticWeights.from_tensors(tensors, checkpoint.params), checkpoint.params)
        self._decoder = make_decoder(head, self._settings, batch_invariant=self._stage.batch_invariant)

    def _inputs(self, works: Sequence[Work[AcousticRequest]], rows: Rows, *, faulty: list[int]) -> FrameInputs:
        hidden = to_torch(rows)
        if faulty:
            hidden[faulty] = 0
        states = [work.state for work in works]
        noise = normals(
            [state.seed for state in states],
            [work.index for work in works],
            self._loaded_checkpoint().params.acoustic_codebooks,
        )
        return FrameInputs(
            hidden=hidden,
            cfg_alpha=torch.tensor([state.cfg_alpha for state in states]).to(self._dtype)[:, None],
            noise=torch.from_numpy(noise).to(self._dtype),
            end_allowed=torch.tensor([work.index >= work.state.min_frames for work in works]),
        )

    def _loaded_checkpoint(self) -> Checkpoint:
        assert self._checkpoint is not None, "the engine was not loaded"
        return self._checkpoint

    def _loaded_decoder(self) -> FrameDecoder:
        assert self._decoder is not None, "the engine was not loaded, or sleeps"
        return self._decoder


def create_engine(settings: StageSettings) -> Engine[AcousticRequest]:
    """The engine of a stage; raises ConfigError if its `engine` settings are faulty."""
    try:
        own = AcousticSettings.model_validate(settings.engine)
    except ValidationError as error:
        raise ConfigError(f"engine settings of {settings.kind}: {describe(error)}") from error
    return AcousticEngine(settings, own)


def _warn_of(checkpoint: Checkpoint) -> None:
    params = checkpoint.params
    if not params.decoding_steps_stated:
        _log.warning(
            "decoding_steps_default", missing="acoustic_transformer_args.n_decoding_steps", used=params.decoding_steps
        )
    if unknown := [name for name in checkpoint.skipped if name.startswith(PREFIX)]:
        _log.warning("acoustic_tensors_skipped", count=len(unknown), first=unknown[0])
