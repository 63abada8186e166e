"""Checking a speech request: everything that can be known before any stage works, all faults at once."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass

from omnistage.stage.v1 import stage_pb2
from omnistage.v1 import speech_pb2
from stage_runtime.config import SpeechPipelineSettings
from stage_runtime.errors import FieldViolation, InvalidRequest, UnknownVoice, list_names

MAX_CLIENT_ID_CHARACTERS = 128
MAX_CFG_ALPHA = 10.0

# Letters and symbols by category, but without a shape: Hangul fillers and the blank braille pattern.
_INVISIBLE = frozenset("\u115f\u1160\u3164\uffa0\u2800")


@dataclass(frozen=True, slots=True)
class SpeechFacts:
    """What the stages told about themselves, as far as requests are checked against it."""

    model: str
    thinker: stage_pb2.SpeechThinkerFacts
    codec: stage_pb2.SpeechCodecFacts


def check_speech(request: speech_pb2.SpeechInput, settings: SpeechPipelineSettings, facts: SpeechFacts) -> None:
    """Check a request; raises InvalidRequest with every faulty field, or UnknownVoice if that is the only fault."""
    violations = [
        *_check_text(request.text, settings.max_text_characters),
        *_check_numbers(request, settings),
        *_check_unsupported(request, facts),
        *_check_label(request.client_request_id),
    ]
    names = [voice.name for voice in facts.thinker.voices]
    if not request.voice:
        violations.append(
            FieldViolation("input.voice", f"must name a voice; valid voices: {list_names(names)}", "REQUIRED")
        )
    elif request.voice not in names:
        if not violations:
            raise UnknownVoice(request.voice, names, model=facts.model)
        violations.append(
            FieldViolation("input.voice", f"does not exist; valid voices: {list_names(names)}", "NOT_FOUND")
        )
    else:
        violations += _check_language(request, facts)
    if violations:
        raise InvalidRequest(violations)


def is_blank(text: str) -> bool:
    """Whether no character of `text` has a shape: white space, control, format and combining characters have none."""
    return not any(unicodedata.category(char)[0] in "LNPS" and char not in _INVISIBLE for char in text)


def _check_text(text: str, limit: int) -> Iterator[FieldViolation]:
    if len(text) > limit:
        yield FieldViolation("input.text", f"has {len(text)} characters; the limit is {limit}", "TOO_LONG")
    elif is_blank(text):
        yield FieldViolation("input.text", "must hold at least one visible character", "REQUIRED")


def _check_numbers(request: speech_pb2.SpeechInput, settings: SpeechPipelineSettings) -> Iterator[FieldViolation]:
    if request.HasField("seed") and request.seed < 0:
        yield FieldViolation("input.seed", f"is {request.seed}; seeds are 0 to 2^63-1", "OUT_OF_RANGE")
    if request.HasField("max_frames") and not 1 <= request.max_frames <= settings.max_frames:
        yield FieldViolation(
            "input.max_frames", f"is {request.max_frames}; it must be 1 to {settings.max_frames}", "OUT_OF_RANGE"
        )
    if request.HasField("cfg_alpha") and not (
        math.isfinite(request.cfg_alpha) and 0 <= request.cfg_alpha <= MAX_CFG_ALPHA
    ):
        yield FieldViolation(
            "input.cfg_alpha", f"is {request.cfg_alpha:g}; it must be 0 to {MAX_CFG_ALPHA:g}", "OUT_OF_RANGE"
        )


def _check_unsupported(request: speech_pb2.SpeechInput, facts: SpeechFacts) -> Iterator[FieldViolation]:
    if request.HasField("speed") and request.speed != 1.0:
        yield FieldViolation(
            "input.speed", f"is {request.speed:g}; this model speaks at speed 1 only (leave it unset)", "UNSUPPORTED"
        )
    rate = facts.codec.sample_rate_hz
    if request.HasField("sample_rate_hz") and request.sample_rate_hz != rate:
        yield FieldViolation(
            "input.sample_rate_hz",
            f"is {request.sample_rate_hz}; this model makes {rate} Hz and audio is not resampled (leave it unset)",
            "UNSUPPORTED",
        )
    if request.reference_audio:
        detail = "is given, but "
        detail += (
            "this server does not imitate voices yet"
            if facts.thinker.encoder_loaded
            else "the model has no encoder weights"
        )
        yield FieldViolation("input.reference_audio", f"{detail}; name a voice instead", "UNSUPPORTED")


def _check_language(request: speech_pb2.SpeechInput, facts: SpeechFacts) -> Iterator[FieldViolation]:
    if not request.language_code:
        return
    primary = request.language_code.partition("-")[0].lower()
    spoken = next(list(voice.language_codes) for voice in facts.thinker.voices if voice.name == request.voice)
    if primary not in spoken:
        known = f"speaks {list_names(spoken)}" if spoken else "does not tell its languages (leave the field empty)"
        yield FieldViolation(
            "input.language_code", f"is {request.language_code[:40]!r}; voice {request.voice!r} {known}", "UNSUPPORTED"
        )


def _check_label(label: str) -> Iterator[FieldViolation]:
    if len(label) > MAX_CLIENT_ID_CHARACTERS or not all(" " <= char <= "~" for char in label):
        yield FieldViolation(
            "input.client_request_id",
            f"must be at most {MAX_CLIENT_ID_CHARACTERS} printable ASCII characters (has {len(label)})",
            "INVALID",
        )
