"""Fake engines for the three roles of a speech pipeline, alike in protocol and facts, arithmetic in place of models.

The hidden state of frame t is [seed of the text, t, code sum of frame t-1, 0]; the codes of frame t follow from it and the
request's seed; the PCM of a frame is a ramp that starts at a value made of its codes. `expected_pcm` gives the whole result.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from pydantic import Field

from omnistage.stage.v1 import stage_pb2
from stage_runtime.config import Settings
from stage_runtime.engine import Admission, CannotAdmitNow, Next, StageDescription, StageRequest, StepResult, Work
from stage_runtime.errors import UnknownVoice
from stage_runtime.tensors import DType, TensorSpec, rows_from_numpy
from stage_runtime.testing.faults import Fault, FaultSettings

CODEBOOKS = 4
HIDDEN = 4
SAMPLES_PER_FRAME = 1920
SAMPLE_RATE_HZ = 24_000
END_AUDIO = 1
VOICES = ("ann", "bob")

_HIDDEN_SPEC = TensorSpec("hidden", DType.F32, (HIDDEN,))
_CODES_SPEC = TensorSpec("codes", DType.I32, (CODEBOOKS,))
_WINDOW_SPEC = TensorSpec("codes", DType.I32, (CODEBOOKS,), ragged=True)
_PCM_SPEC = TensorSpec("pcm", DType.F32, (), ragged=True)


class FakeSettings(Settings):
    """Settings of all three."""

    step_s: float = Field(0.0, ge=0, description="how long a step takes")
    load_s: float = Field(0.0, ge=0, description="how long loading takes")
    capacity: int = Field(32, ge=1)
    end_after: int = Field(
        0, ge=0, description="acoustic: frames before END_AUDIO; 0: as many as the text has characters"
    )
    fault: FaultSettings | None = None
    fingerprint: str = "fake"
    codebooks: int = Field(CODEBOOKS, description="codec: codes a frame that it claims to have")


def text_value(text: str, voice: str) -> int:
    """The number that stands for a text and a voice."""
    return zlib.crc32(f"{voice}\n{text}".encode()) % 1000


def frame_codes(value: int, index: int, previous: int, seed: int) -> list[int]:
    """Codes of frame `index`; `previous` is the sum of the codes before."""
    return [2 + (value + 7 * index + previous + 13 * seed + 31 * book) % 20 for book in range(CODEBOOKS)]


def frame_pcm(codes: Sequence[int]) -> npt.NDArray[np.float32]:
    """Samples [1920] of a frame, within (-1, 1)."""
    start = sum(code * 21**place for place, code in enumerate(codes)) % 997 / 1000 - 0.5
    ramp = np.arange(SAMPLES_PER_FRAME, dtype=np.float32) / np.float32(10_000)
    return np.float32(start) + ramp


def expected_pcm(text: str, voice: str, seed: int, frames: int) -> npt.NDArray[np.float32]:
    """What the three fakes make of a request together: samples [frames * 1920]."""
    value, previous, pieces = text_value(text, voice), 0, []
    for index in range(frames):
        codes = frame_codes(value, index, previous, seed)
        previous = sum(codes)
        pieces.append(frame_pcm(codes))
    return np.concatenate(pieces)


@dataclass(slots=True)
class _State:
    value: int = 0
    seed: int = 0
    length: int = 0


class _Fake:
    """What the three have in common."""

    kind = ""
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()

    def __init__(self, settings: FakeSettings) -> None:
        self.settings = settings
        self.fault = Fault(settings.fault)
        self.alive = 0

    def load(self) -> None:
        time.sleep(self.settings.load_s)

    def facts(self) -> stage_pb2.SpeechThinkerFacts | stage_pb2.SpeechCodecFacts | None:
        return None

    def describe(self) -> StageDescription:
        return StageDescription(
            kind=self.kind,
            model="fake",
            fingerprint=self.settings.fingerprint,
            capacity=self.settings.capacity,
            inputs=self.inputs,
            outputs=self.outputs,
            facts=self.facts(),
        )

    def new_state(self, request: StageRequest) -> _State:
        raise NotImplementedError

    def admit(self, request: StageRequest) -> Admission[_State]:
        if self.alive >= self.settings.capacity:
            raise CannotAdmitNow
        state = self.new_state(request)
        self.alive += 1
        return Admission(state, needs_input=self.kind != "fake.thinker", text_token_count=1, prompt_token_count=2)

    def batch_key(self, state: _State) -> Hashable:
        del state
        return None

    def begin(self, works: Sequence[Work[_State]]) -> None:
        for work in works:
            self.fault.act(work.index)
        time.sleep(self.settings.step_s)

    def release(self, state: _State) -> None:
        del state
        self.alive -= 1

    def recover(self) -> None:
        """Nothing is cached."""

    def sleep(self, level: int) -> None:
        """Nothing is held."""

    def wake(self) -> None:
        """Nothing was dropped."""


class FakeThinker(_Fake):
    """Text and voice to hidden states."""

    kind = "fake.thinker"
    inputs = (_CODES_SPEC,)
    outputs = (_HIDDEN_SPEC,)

    def facts(self) -> stage_pb2.SpeechThinkerFacts:
        """Two voices; "ann" speaks English, "bob" does not tell."""
        return stage_pb2.SpeechThinkerFacts(
            voices=[
                stage_pb2.SpeechVoice(name="ann", row_count=5, language_codes=["en"]),
                stage_pb2.SpeechVoice(name="bob", row_count=9),
            ],
            max_positions=10_000,
            cache_token_count=320_000,
            codebook_count=CODEBOOKS,
        )

    def new_state(self, request: StageRequest) -> _State:
        """Check the voice."""
        params = request.params
        assert isinstance(params, stage_pb2.SpeechThinkerParams)
        if params.voice not in VOICES:
            raise UnknownVoice(params.voice, VOICES)
        return _State(value=text_value(params.text, params.voice), length=len(params.text))

    def step(self, works: Sequence[Work[_State]]) -> StepResult:
        """One hidden state for each work."""
        self.begin(works)
        rows = np.zeros((len(works), HIDDEN), np.float32)
        for row, work in zip(rows, works, strict=True):
            previous = work.inputs["codes"].numpy().sum() if work.inputs else 0
            row[:] = (work.state.value, work.index, previous, work.state.length)
            if self.fault.due(work.index, "nan"):
                row[0] = np.nan
        return StepResult([Next.WAIT] * len(works), {"hidden": rows_from_numpy(rows)})


class FakeAcoustic(_Fake):
    """Hidden states to codes."""

    kind = "fake.acoustic"
    inputs = (_HIDDEN_SPEC,)
    outputs = (_CODES_SPEC,)

    def new_state(self, request: StageRequest) -> _State:
        """Keep the seed."""
        params = request.params
        assert isinstance(params, stage_pb2.SpeechAcousticParams)
        return _State(seed=params.seed % 1000)

    def step(self, works: Sequence[Work[_State]]) -> StepResult:
        """One frame for each work."""
        self.begin(works)
        rows = np.zeros((len(works), CODEBOOKS), np.int32)
        for row, work in zip(rows, works, strict=True):
            value, index, previous, length = (int(number) for number in work.inputs["hidden"].numpy()[0])
            if index >= (self.settings.end_after or length):
                row[:] = [END_AUDIO, *[2] * (CODEBOOKS - 1)]
            else:
                row[:] = frame_codes(value, index, previous, work.state.seed)
        if any(self.fault.due(work.index, "bad_shape") for work in works):
            rows = rows[:, :-1]
        return StepResult([Next.WAIT] * len(works), {"codes": rows_from_numpy(rows)})


class FakeCodec(_Fake):
    """Codes to samples."""

    kind = "fake.codec"
    inputs = (_WINDOW_SPEC,)
    outputs = (_PCM_SPEC,)

    def facts(self) -> stage_pb2.SpeechCodecFacts:
        """The real codec's numbers."""
        return stage_pb2.SpeechCodecFacts(
            sample_rate_hz=SAMPLE_RATE_HZ,
            samples_per_frame=SAMPLES_PER_FRAME,
            left_reach_frames=21,
            max_window_frames=400,
            codebook_count=self.settings.codebooks,
        )

    def new_state(self, request: StageRequest) -> _State:
        """Nothing to keep."""
        del request
        return _State()

    def step(self, works: Sequence[Work[_State]]) -> StepResult:
        """The samples of each work's new frames."""
        self.begin(works)
        pieces = []
        for work in works:
            frames = work.inputs["codes"].numpy()[work.context_count :]
            samples = np.concatenate([frame_pcm([int(code) for code in frame]) for frame in frames])
            if self.fault.due(work.index, "nan"):
                samples[0] = np.nan
            if self.fault.due(work.index, "bad_shape"):
                samples = samples[:-1]
            pieces.append(samples)
        counts = [len(piece) for piece in pieces]
        return StepResult([Next.WAIT] * len(works), {"pcm": rows_from_numpy(np.concatenate(pieces), row_counts=counts)})
