"""From text and voice to prompt ids (specification of Voxtral TTS, section 3), with Mistral's own tokenizer.

    [ <s>, [BEGIN_AUDIO], [AUDIO] x N, [NEXT_AUDIO_TEXT], text ids ..., [REPEAT_AUDIO_TEXT], [BEGIN_AUDIO] ]

Rows 2 to N + 1 are placeholders: the voice's rows take the place of their embeddings.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from mistral_common.exceptions import MistralCommonException
from mistral_common.protocol.speech.request import SpeechRequest
from mistral_common.tokens.tokenizers.audio import SpecialAudioIDs
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

from services.voxtral.params import VoxtralParams
from stage_runtime.errors import CheckpointDamaged

TOKENIZER = "tekken.json"
FIRST_VOICE_ROW = 2
MARKER_COUNT = 5

Tokenizer = MistralTokenizer[Any, Any, Any, Any, Any]

# Letters and symbols by category, but without a shape: Hangul fillers and the blank braille pattern.
_INVISIBLE = frozenset("\u115f\u1160\u3164\uffa0\u2800")

# What the library is known to raise for a tekken.json that is damaged or of another kind.
_UNREADABLE = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
    OverflowError,
    RecursionError,
    MistralCommonException,
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Ids of a prompt; `voice_row_count` of them, from FIRST_VOICE_ROW on, are placeholders for the voice's rows."""

    ids: tuple[int, ...]
    voice_row_count: int

    @property
    def text_token_count(self) -> int:
        """Tokens of the text alone."""
        return len(self.ids) - self.voice_row_count - MARKER_COUNT


@dataclass(frozen=True, slots=True)
class PromptBuilder:
    """The tokenizer of a checkpoint. `voice_row_counts` holds N of each voice that it knows."""

    tokenizer: Tokenizer
    voice_row_counts: Mapping[str, int]
    fingerprint: str  # of tekken.json

    @classmethod
    def open(cls, directory: Path, params: VoxtralParams) -> Self:
        """Read tekken.json of a checkpoint directory.

        Raises CheckpointDamaged if it is missing, damaged, not made for speech, or does not fit params.json.
        """
        file = directory / TOKENIZER
        if not file.is_file():
            raise CheckpointDamaged(str(file), "is missing")
        try:
            fingerprint = hashlib.sha256(file.read_bytes()).hexdigest()
            tokenizer = MistralTokenizer.from_file(file)
        except _UNREADABLE as error:
            raise CheckpointDamaged(
                str(file), f"cannot be read as a tokenizer: {type(error).__name__}: {str(error)[:200]}"
            ) from error
        builder = cls(tokenizer, _voice_row_counts(file, tokenizer), fingerprint)
        builder._check(file, params)
        return builder

    def build(self, text: str, voice: str) -> Prompt:
        """The prompt of a text and a voice of `voice_row_counts`. The text is encoded as it is."""
        ids = self.tokenizer.encode_speech_request(SpeechRequest(input=text, voice=voice)).tokens
        return Prompt(tuple(ids), self.voice_row_counts[voice])

    def _check(self, file: Path, params: VoxtralParams) -> None:
        """Check that ids agree with params.json and prompts come out in the layout that this module states."""
        special = _special_ids(file, self.tokenizer)
        for name, ours, theirs in (
            ("audio_token_id", special.audio, params.audio_token_id),
            ("begin_audio_token_id", special.begin_audio, params.begin_audio_token_id),
            ("vocab_size", self.tokenizer.instruct_tokenizer.tokenizer.n_words, params.vocab_size),
        ):
            if ours != theirs:
                raise CheckpointDamaged(str(file), f"has {ours} where params.json has {name} {theirs}")
        bos = self.tokenizer.instruct_tokenizer.tokenizer.bos_id
        for voice, count in self.voice_row_counts.items():
            try:
                ids = list(self.build("a", voice).ids)
            except _UNREADABLE as error:
                raise CheckpointDamaged(
                    str(file), f"makes no speech prompts: {type(error).__name__}: {str(error)[:200]}"
                ) from error
            head = [bos, special.begin_audio, *[special.audio] * count, special.text_to_audio]
            if ids[: len(head)] != head or ids[-2:] != [special.audio_to_text, special.begin_audio]:
                raise CheckpointDamaged(str(file), f"makes prompts in another layout than Voxtral TTS: {ids[:80]}")


def is_blank(text: str) -> bool:
    """Whether no character of `text` has a shape: white space, control, format and combining characters have none."""
    return not any(unicodedata.category(char)[0] in "LNPS" and char not in _INVISIBLE for char in text)


def _special_ids(file: Path, tokenizer: Tokenizer) -> SpecialAudioIDs:
    encoder = tokenizer.instruct_tokenizer.audio_encoder
    if encoder is None:
        raise CheckpointDamaged(str(file), "has no audio section: it cannot be used for speech")
    special = encoder.special_ids
    if None in {special.audio, special.begin_audio, special.text_to_audio, special.audio_to_text}:
        raise CheckpointDamaged(
            str(file), "lacks one of the tokens [AUDIO], [BEGIN_AUDIO], [NEXT_AUDIO_TEXT], [REPEAT_AUDIO_TEXT]"
        )
    return special


def _voice_row_counts(file: Path, tokenizer: Tokenizer) -> dict[str, int]:
    encoder = tokenizer.instruct_tokenizer.audio_encoder
    counts = encoder.audio_config.voice_num_audio_tokens if encoder is not None else None
    for voice, count in (counts or {}).items():
        if not isinstance(count, int) or count < 1:
            raise CheckpointDamaged(
                str(file), f"gives voice {voice!r} {count!r} rows; it must be a whole number from 1"
            )
    return dict(counts or {})
