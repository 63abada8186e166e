"""Sizes of the released Voxtral TTS model (specification, section 2.1), for benchmarks and checks that need no weights."""

from __future__ import annotations

from typing import Any

from services.voxtral.params import VoxtralParams, parse_params

TREE: dict[str, Any] = {
    "model_type": "voxtral_tts",
    "dim": 3072,
    "n_layers": 26,
    "head_dim": 128,
    "hidden_dim": 9216,
    "n_heads": 32,
    "n_kv_heads": 8,
    "rope_theta": 1_000_000.0,
    "norm_eps": 1e-5,
    "vocab_size": 131_072,
    "multimodal": {
        "audio_model_args": {
            "semantic_codebook_size": 8192,
            "acoustic_codebook_size": 21,
            "n_acoustic_codebook": 36,
            "audio_token_id": 24,
            "begin_audio_token_id": 25,
            "acoustic_transformer_args": {
                "input_dim": 3072,
                "dim": 3072,
                "n_layers": 3,
                "head_dim": 128,
                "hidden_dim": 9216,
                "n_heads": 32,
                "n_kv_heads": 8,
                "use_biases": False,
            },
        },
        "audio_tokenizer_args": {"sampling_rate": 24_000},
    },
}


def params() -> VoxtralParams:
    """The released model's sizes."""
    return parse_params(TREE)
