"""Checking what comes to the thinker: text, voice and frame count of a request, codes of frames."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from omnistage.stage.v1 import stage_pb2
from services.thinker.prompt import Prompt, PromptBuilder, is_blank
from services.thinker.voices import Voices
from services.voxtral.params import SPECIAL_CODES, VoxtralParams
from stage_runtime.engine import StageRequest
from stage_runtime.errors import FieldViolation, InvalidRequest, StageProtocolError, UnknownVoice, list_names
from stage_runtime.tensors import DType, Rows, TensorSpec, check_tensors

Codes = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RequestChecks:
    """What requests are checked against."""

    model: str
    prompts: PromptBuilder
    voices: Voices
    max_positions: int
    codes: CodeChecks

    def check(self, request: StageRequest) -> tuple[stage_pb2.SpeechThinkerParams, Prompt, Codes]:
        """Check a request; gives its params, its prompt, and the frames made before (P, K), P >= 0.

        Raises:
            InvalidRequest: The text is blank or too long, the frame count does not fit, or the voice's file is unusable.
            UnknownVoice: There is no such voice.
            StageProtocolError: Params or tensors are not what a router may send.
        """
        params = request.params
        if not isinstance(params, stage_pb2.SpeechThinkerParams):
            raise StageProtocolError(
                f"params are {params.DESCRIPTOR.name}; a Voxtral thinker takes SpeechThinkerParams"
            )
        self._check_input(params)
        prompt = self.prompts.build(params.text, params.voice)
        self._check_length(params, prompt)
        prior = self.codes.prior(request.tensors)
        if len(prior) > params.max_frames:
            raise StageProtocolError(f"{len(prior)} earlier frames came with max_frames {params.max_frames}")
        return params, prompt, prior

    def _check_input(self, params: stage_pb2.SpeechThinkerParams) -> None:
        violations: list[FieldViolation] = []
        if is_blank(params.text):
            violations.append(FieldViolation("input.text", "must hold at least one visible character", "REQUIRED"))
        if params.max_frames < 1:
            violations.append(FieldViolation("input.max_frames", "is 0; it must be at least 1", "OUT_OF_RANGE"))
        valid = self.voices.rows
        if (fault := self.voices.faults.get(params.voice)) is not None:
            description = f"cannot be used on this server: {fault}; usable voices: {list_names(valid)}"
            violations.append(FieldViolation("input.voice", description, "VOICE_UNUSABLE"))
        elif params.voice not in valid:
            if not violations:
                raise UnknownVoice(params.voice, valid, model=self.model)
            description = f"does not exist; valid voices: {list_names(valid)}"
            violations.append(FieldViolation("input.voice", description, "NOT_FOUND"))
        if violations:
            raise InvalidRequest(violations)

    def _check_length(self, params: stage_pb2.SpeechThinkerParams, prompt: Prompt) -> None:
        length, limit = len(prompt.ids), self.max_positions
        if length >= limit:
            most = max(0, limit - 1 - length + prompt.text_token_count)
            description = (
                f"has {prompt.text_token_count} tokens, with the voice's rows a prompt of {length}; the limit for prompt and "
                f"frames is {limit} positions: at most {most} tokens of text fit"
            )
            raise InvalidRequest([FieldViolation("input.text", description, "TOO_LONG")])
        if length + params.max_frames > limit:
            description = (
                f"is {params.max_frames}; the prompt has {length} tokens and the limit for prompt and frames is {limit} positions: "
                f"at most {limit - length} frames fit"
            )
            raise InvalidRequest([FieldViolation("input.max_frames", description, "OUT_OF_RANGE")])


@dataclass(frozen=True, slots=True)
class CodeChecks:
    """Ranges of codes: 0 to limits[c] - 1 in codebook c, EMPTY_AUDIO and END_AUDIO included (section 5.2)."""

    limits: Codes  # (K,)

    @classmethod
    def of(cls, params: VoxtralParams) -> CodeChecks:
        """The ranges of a model."""
        acoustic = params.acoustic_codebook_size + SPECIAL_CODES
        limits = [params.semantic_codebook_size + SPECIAL_CODES, *[acoustic] * params.acoustic_codebooks]
        return cls(np.array(limits, dtype=np.int64))

    def spec(self, *, ragged: bool) -> TensorSpec:
        """Spec of the tensor `codes`: one frame (K,) a row."""
        return TensorSpec("codes", DType.I32, (len(self.limits),), ragged=ragged)

    def prior(self, tensors: Mapping[str, Rows]) -> Codes:
        """Frames that came with a request, (P, K); P is 0 if none did. Raises StageProtocolError for what is no frames."""
        if not tensors:
            return np.empty((0, len(self.limits)), dtype=np.int64)
        check_tensors(tensors, [self.spec(ragged=True)])
        codes = tensors["codes"].numpy().astype(np.int64)
        for frame, fault in self.faults(codes).items():
            raise StageProtocolError(f"frame {frame}: {fault}")
        return codes

    def faults(self, codes: Codes) -> dict[int, str]:
        """What is wrong with frames (frames, K), by index."""
        bad = (codes < 0) | (codes >= self.limits)
        faults: dict[int, str] = {}
        for frame in np.flatnonzero(bad.any(axis=1)).tolist():
            book = int(bad[frame].argmax())
            faults[frame] = f"code {codes[frame, book]} of codebook {book} is not in 0 to {self.limits[book] - 1}"
        return faults
