"""What the thinker finds out before it reads weights: the checkpoint's parts, how many requests fit, what it tells of itself."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from omnistage.stage.v1 import stage_pb2
from services.thinker.checks import CodeChecks, RequestChecks
from services.thinker.model import slot_bytes
from services.thinker.prompt import PromptBuilder
from services.thinker.runner import RunnerPlan
from services.thinker.settings import ThinkerSettings
from services.thinker.voices import Voices, languages, load_voices
from services.voxtral.checkpoint import Checkpoint, open_checkpoint
from services.voxtral.params import TransformerParams
from stage_runtime.config import ConfigError, StageSettings
from stage_runtime.engine import StageDescription
from stage_runtime.errors import CheckpointDamaged
from stage_runtime.logs import get_logger
from stage_runtime.tensors import TensorSpec
from stage_runtime.torch_tensors import wire_type

_log = get_logger(__name__)

KIND = "voxtral.thinker"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_OTHER_STAGES = ("acoustic_transformer.", "audio_tokenizer.")


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A checkpoint with everything but its weights. `voices` are in host memory."""

    checkpoint: Checkpoint
    voices: Voices
    checks: RequestChecks
    plan: RunnerPlan
    description: StageDescription


def open_model(stage: StageSettings, settings: ThinkerSettings, device: torch.device) -> OpenedModel:
    """Open the checkpoint that the settings name.

    Raises:
        CheckpointDamaged: A file is missing or damaged, or no voice at all can be used.
        ConfigError: cache_bytes does not hold one request.
    """
    checkpoint = open_checkpoint(stage.model)
    params = checkpoint.params
    dtype = _DTYPES[stage.dtype]
    if unknown := [name for name in checkpoint.skipped if not name.startswith(_OTHER_STAGES)]:
        _log.warning("thinker_tensors_skipped", count=len(unknown), first=unknown[0])
    slots = slot_count(params.llm, settings, dtype)
    prompts = PromptBuilder.open(checkpoint.directory, params)
    voices = _open_voices(checkpoint, prompts, dtype)
    checks = RequestChecks(checkpoint.name, prompts, voices, settings.max_positions, CodeChecks.of(params))
    plan = RunnerPlan(settings, slots, dtype, device, stage.batch_invariant)
    description = StageDescription(
        kind=KIND,
        model=checkpoint.name,
        fingerprint=_fingerprint(checkpoint, prompts, voices, dtype),
        capacity=slots,
        inputs=(checks.codes.spec(ragged=False),),
        outputs=(TensorSpec("hidden", wire_type(dtype), (params.llm.dim,)),),
        facts=_facts(checkpoint, voices, settings, slots),
    )
    return OpenedModel(checkpoint, voices, checks, plan, description)


def slot_count(params: TransformerParams, settings: ThinkerSettings, dtype: torch.dtype) -> int:
    """Requests that the cache holds at once; raises ConfigError if not even one."""
    needed = slot_bytes(params, settings.max_positions, dtype)
    slots = min(settings.max_sequences, settings.cache_bytes // needed)
    if slots < 1:
        raise ConfigError(
            f"engine.cache_bytes is {settings.cache_bytes}; one request of engine.max_positions {settings.max_positions} needs "
            f"{needed} bytes in {dtype}: raise cache_bytes to that at least, or lower max_positions"
        )
    return slots


def _open_voices(checkpoint: Checkpoint, prompts: PromptBuilder, dtype: torch.dtype) -> Voices:
    counts = prompts.voice_row_counts
    names = {*checkpoint.params.voices, *counts}
    voices = load_voices(checkpoint.directory, names, counts, checkpoint.params.llm.dim, dtype)
    for name, fault in voices.faults.items():
        _log.warning("voice_left_out", voice=name, fault=fault)
    if not voices.rows:
        faults = "; ".join(f"{name}: {fault}" for name, fault in list(voices.faults.items())[:5])
        raise CheckpointDamaged(str(checkpoint.directory), f"has no usable voice: {faults or 'none is listed'}")
    return voices


def _fingerprint(checkpoint: Checkpoint, prompts: PromptBuilder, voices: Voices, dtype: torch.dtype) -> str:
    """Of everything that hidden states depend on: replicas that differ in one voice file would mix voices at a failover."""
    digest = hashlib.sha256(f"{checkpoint.fingerprint} {dtype} {prompts.fingerprint}".encode())
    for name, rows in voices.rows.items():
        digest.update(name.encode())
        digest.update(rows.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _facts(
    checkpoint: Checkpoint, voices: Voices, settings: ThinkerSettings, slots: int
) -> stage_pb2.SpeechThinkerFacts:
    return stage_pb2.SpeechThinkerFacts(
        voices=[
            stage_pb2.SpeechVoice(name=name, row_count=rows.shape[0], language_codes=languages(name))
            for name, rows in sorted(voices.rows.items())
        ],
        max_positions=settings.max_positions,
        cache_token_count=slots * settings.max_positions,
        codebook_count=checkpoint.params.codebook_count,
        encoder_loaded=checkpoint.encoder_loaded,
    )
