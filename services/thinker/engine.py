"""Engine of the thinker stage: prompts of requests, then one hidden state for each frame that comes in.

Output t is the hidden state that frame t is made from: output 0 comes from the prompt, output t + 1 from frame t.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from pydantic import ValidationError

from services.thinker.checks import Codes
from services.thinker.loading import OpenedModel, open_model
from services.thinker.model import DecodeRow
from services.thinker.prompt import Prompt
from services.thinker.runner import Runner
from services.thinker.settings import ThinkerSettings
from services.voxtral.checkpoint import open_checkpoint
from stage_runtime.config import ConfigError, StageSettings, describe
from stage_runtime.engine import (
    Admission,
    CannotAdmitNow,
    Engine,
    Next,
    StageDescription,
    StageRequest,
    StepResult,
    Work,
)
from stage_runtime.errors import CheckpointDamaged, OmnistageError, StageOutOfMemory, StageProtocolError
from stage_runtime.memory import is_out_of_memory
from stage_runtime.torch_tensors import from_torch


@dataclass(slots=True)
class ThinkerRequest:
    """An admitted request. `position` counts the positions filled in its slot: 0, then the prompt's, then one more with each frame."""

    slot: int
    prompt: Prompt
    voice: str
    max_frames: int
    prior: Codes  # (P, K), frames made before this request came here
    turn: int
    position: int = 0
    touched: int = 0  # positions of the slot that may have been written

    @property
    def frame_count(self) -> int:
        """Frames fed so far."""
        return self.position - len(self.prompt.ids)

    @property
    def first_output_position(self) -> int:
        """`position` at which the request gives its first output: prompt and earlier frames are in."""
        return len(self.prompt.ids) + len(self.prior)


class ThinkerEngine:
    """Engine of kind voxtral.thinker. Input `codes`: a row [K], int32. Output `hidden`: a row [D] of the run dtype."""

    def __init__(self, stage: StageSettings, settings: ThinkerSettings, device: torch.device) -> None:
        self._stage = stage
        self._settings = settings
        self._device = device
        self._model: OpenedModel | None = None
        self._runner: Runner | None = None
        self._voice_rows: Mapping[str, torch.Tensor] = {}
        self._free: list[int] = []
        self._turn = 0

    def load(self) -> None:
        """Read configuration, tokenizer, voices and weights; warm up.

        Raises CheckpointDamaged, ConfigError (see `open_model`), or StageOutOfMemory if weights and cache do not fit the device.
        """
        self._model = open_model(self._stage, self._settings, self._device)
        self._free = list(range(self._model.plan.slots))
        self._load_runner(self._model)

    def describe(self) -> StageDescription:
        """See Engine."""
        return self._loaded().description

    def admit(self, request: StageRequest) -> Admission[ThinkerRequest]:
        """Check a request and reserve a slot. Raises what RequestChecks.check raises, or CannotAdmitNow if no slot is free."""
        params, prompt, prior = self._loaded().checks.check(request)
        if not self._free:
            raise CannotAdmitNow
        self._turn += 1
        # The lowest slot: those in use stay together, and attention takes neighbours in one call.
        slot = heapq.heappop(self._free)
        return Admission(
            ThinkerRequest(slot, prompt, params.voice, params.max_frames, prior, self._turn),
            needs_input=False,
            first_index=len(prior),
            text_token_count=prompt.text_token_count,
            prompt_token_count=len(prompt.ids),
        )

    def batch_key(self, state: ThinkerRequest) -> None:
        """All requests share steps."""

    @torch.inference_mode()
    def step(self, works: Sequence[Work[ThinkerRequest]]) -> StepResult:
        """Compute the prompts that are due, and feed one frame to each of the other requests. The rest stays SILENT."""
        states = [work.state for work in works]
        prefills = self._due_prefills(states)
        frames, errors = self._frames(works)
        hidden = [self._prefill(states[place]) for place in prefills]
        if frames:
            hidden.append(self._decode([states[place] for place in frames], np.stack(list(frames.values()))))
        done = [*prefills, *frames]  # whose rows `hidden` holds, in this order
        emitted = [place for place in sorted(done) if states[place].touched >= states[place].first_output_position]
        rows = from_torch(self._rows(hidden, [done.index(place) for place in emitted]))

        following = [Next.SILENT] * len(works)
        for place in done:  # nothing raises from here on
            states[place].position = states[place].touched
        for place in emitted:
            following[place] = Next.WAIT
        for place in errors:
            following[place] = Next.FAILED
        return StepResult(next=following, tensors={"hidden": rows}, errors=errors)

    @torch.inference_mode()
    def release(self, state: ThinkerRequest) -> None:
        """Erase the slot and give it back."""
        self._running().cache.clear(state.slot, state.touched)
        heapq.heappush(self._free, state.slot)

    def recover(self) -> None:
        """Give unused device memory back to the driver."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def sleep(self, level: int) -> None:
        """1: weights and cache leave the accelerator; on a CPU there is none to leave. 2: they leave memory."""
        if level >= 2 or self._device.type != "cpu":
            self._runner = None
            self._voice_rows = {}
            self.recover()

    def wake(self) -> None:
        """Read the weights again, if `sleep` dropped them. Raises CheckpointDamaged if they are no longer the same."""
        if self._runner is None:
            model = self._loaded()
            if open_checkpoint(self._stage.model).fingerprint != model.checkpoint.fingerprint:
                raise CheckpointDamaged(str(self._stage.model), "changed while the stage slept; restart the stage")
            self._load_runner(model)

    def _load_runner(self, model: OpenedModel) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            self._runner = Runner.load(model.checkpoint, model.plan)
            self._voice_rows = {name: rows.to(self._device) for name, rows in model.voices.rows.items()}
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise StageOutOfMemory(
                f"weights and a key-value cache for {model.plan.slots} requests do not fit {self._device}; "
                "lower engine.cache_bytes or engine.max_sequences"
            ) from error

    def _due_prefills(self, states: Sequence[ThinkerRequest]) -> list[int]:
        """Places of the requests whose prompts this step computes: those admitted first."""
        waiting = [place for place, state in enumerate(states) if state.position == 0]
        waiting.sort(key=lambda place: states[place].turn)
        return waiting[: self._settings.max_prefills_per_step]

    def _frames(self, works: Sequence[Work[ThinkerRequest]]) -> tuple[dict[int, Codes], dict[int, OmnistageError]]:
        """Frames to feed by place, each (K,), and the errors of requests whose frame cannot be fed."""
        frames: dict[int, Codes] = {}
        errors: dict[int, OmnistageError] = {}
        for place, work in enumerate(works):
            state = work.state
            if state.position == 0:
                continue
            if state.position < state.first_output_position:
                frames[place] = state.prior[state.frame_count]
            elif state.frame_count >= state.max_frames:
                detail = f"frame {state.frame_count} came; the request reserved positions for {state.max_frames} frames"
                errors[place] = StageProtocolError(detail)
            else:
                frames[place] = work.inputs["codes"].numpy()[0].astype(np.int64)
        if frames:
            places = list(frames)
            for index, fault in self._loaded().checks.codes.faults(np.stack(list(frames.values()))).items():
                place = places[index]
                del frames[place]
                errors[place] = StageProtocolError(f"frame {works[place].state.frame_count}: {fault}")
        return frames, errors

    def _prefill(self, state: ThinkerRequest) -> torch.Tensor:
        """Hidden state (1, D) of the last row of a prompt.

        Frames made before are appended to the prompt, but with batch_invariant they take the same way as they did then, through
        `_decode`: the sums of a long prefill differ in their last bits from those of steps.
        """
        runner = self._running()
        x = runner.prompt_embeddings(state.prompt.ids, self._voice_rows[state.voice])
        if len(state.prior) and not self._stage.batch_invariant:
            x = torch.cat([x, runner.frame_embeddings(state.prior)])
        state.touched = x.shape[0]
        return runner.prefill(x, state.slot)

    def _decode(self, states: Sequence[ThinkerRequest], codes: Codes) -> torch.Tensor:
        """Hidden states (n, D) after one more frame (n, K) each."""
        for state in states:
            state.touched = state.position + 1
        return self._running().decode([DecodeRow(state.slot, state.position) for state in states], codes)

    def _rows(self, parts: Sequence[torch.Tensor], order: Sequence[int]) -> torch.Tensor:
        """Rows of the concatenated parts in another order."""
        if not parts:
            plan = self._loaded().plan
            return torch.empty(0, self._loaded().checkpoint.params.llm.dim, dtype=plan.dtype)
        table = parts[0] if len(parts) == 1 else torch.cat(list(parts))
        return table if list(order) == list(range(len(table))) else table[list(order)]

    def _loaded(self) -> OpenedModel:
        assert self._model is not None, "the engine was not loaded"
        return self._model

    def _running(self) -> Runner:
        assert self._runner is not None, "the engine was not loaded, or sleeps"
        return self._runner


def create_engine(settings: StageSettings) -> Engine[ThinkerRequest]:
    """The engine of a stage; raises ConfigError if its device or its `engine` settings are faulty."""
    try:
        own = ThinkerSettings.model_validate(settings.engine)
    except ValidationError as error:
        raise ConfigError(f"engine settings of {settings.kind}: {describe(error)}") from error
    return ThinkerEngine(settings, own, _device(settings.device))


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device {name!r} is not a torch device; use cpu, cuda or cuda:<number>") from None
    if device.type == "cuda" and not 0 <= (device.index or 0) < torch.cuda.device_count():
        raise ConfigError(f"device {name!r} is not there: torch sees {torch.cuda.device_count()} CUDA devices")
    return device
