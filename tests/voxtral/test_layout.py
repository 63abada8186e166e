"""The layout of the released 4B checkpoint: 386 tensors, their bytes, and models of that size on the meta device."""

from __future__ import annotations

import json
import math

import pytest
import torch

from services.thinker.model import DecodeRow, KeyValueCache, Thinker, ThinkerWeights
from services.voxtral.params import VoxtralParams, expected_tensors, parse_params

# Values of the release, specification section 2.1; keys that the release leaves out are left out.
RELEASE = {
    "dim": 3072,
    "n_layers": 26,
    "head_dim": 128,
    "hidden_dim": 9216,
    "n_heads": 32,
    "n_kv_heads": 8,
    "rope_theta": 1000000.0,
    "norm_eps": 1e-05,
    "vocab_size": 131072,
    "max_seq_len": 65536,
    "max_position_embeddings": 128000,
    "use_biases": False,
    "causal": True,
    "model_parallel": 1,
    "tied_embeddings": True,
    "model_type": "voxtral_tts",
    "multimodal": {
        "bos_token_id": 1,
        "audio_model_args": {
            "semantic_codebook_size": 8192,
            "acoustic_codebook_size": 21,
            "n_acoustic_codebook": 36,
            "audio_token_id": 24,
            "begin_audio_token_id": 25,
            "input_embedding_concat_type": "sum",
            "p_uncond": 0.0,
            "text_feature_bugged": False,
            "condition_dropped_token_id": 42,
            "audio_encoding_args": {
                "codebook_pattern": "parallel",
                "interleave_audio_tokens_per_segment": 8192,
                "interleave_text_tokens_per_segment": 8192,
                "single_trailing_segment": False,
                "num_codebooks": 37,
                "sampling_rate": 24000,
                "frame_rate": 12.5,
            },
            "acoustic_transformer_args": {
                "input_dim": 3072,
                "dim": 3072,
                "n_layers": 3,
                "head_dim": 128,
                "hidden_dim": 9216,
                "n_heads": 32,
                "n_kv_heads": 8,
                "use_biases": False,
                "rope_theta": 10000.0,
                "sigma": 1e-05,
                "sigma_max": 1.0,
            },
        },
        "audio_tokenizer_args": {
            "channels": 1,
            "sampling_rate": 24000,
            "pretransform_patch_size": 240,
            "patch_proj_kernel_size": 7,
            "semantic_codebook_size": 8192,
            "semantic_dim": 256,
            "acoustic_codebook_size": 21,
            "acoustic_dim": 36,
            "conv_weight_norm": True,
            "causal": True,
            "attn_sliding_window_size": 16,
            "half_attn_window_upon_downsampling": True,
            "dim": 1024,
            "hidden_dim": 4096,
            "head_dim": 128,
            "n_heads": 8,
            "n_kv_heads": 8,
            "qk_norm_eps": 1e-06,
            "qk_norm": True,
            "use_biases": False,
            "norm_eps": 0.01,
            "layer_scale": True,
            "layer_scale_init": 0.01,
            "decoder_transformer_lengths_str": "2,2,2,2",
            "decoder_convs_kernels_str": "3,4,4,4",
            "decoder_convs_strides_str": "1,2,2,2",
            "voice": {"casual_female": 0, "casual_male": 1},
        },
    },
}

Table = dict[str, tuple[int, ...]]


def block(prefix: str) -> Table:
    """The nine tensors of an LLM or acoustic layer."""
    return {
        f"{prefix}attention.wq.weight": (4096, 3072),
        f"{prefix}attention.wk.weight": (1024, 3072),
        f"{prefix}attention.wv.weight": (1024, 3072),
        f"{prefix}attention.wo.weight": (3072, 4096),
        f"{prefix}attention_norm.weight": (3072,),
        f"{prefix}ffn_norm.weight": (3072,),
        f"{prefix}feed_forward.w1.weight": (9216, 3072),
        f"{prefix}feed_forward.w3.weight": (9216, 3072),
        f"{prefix}feed_forward.w2.weight": (3072, 9216),
    }


def codec_layer(prefix: str) -> Table:
    """The thirteen tensors of a codec layer."""
    square = {f"{prefix}attention.{name}.weight": (1024, 1024) for name in ("wq", "wk", "wv", "wo")}
    vectors = ("attention.q_norm.weight", "attention.k_norm.weight", "attention_norm.weight", "ffn_norm.weight")
    return {
        **square,
        **{prefix + name: (1024,) for name in (*vectors, "attention_scale", "ffn_scale")},
        f"{prefix}feed_forward.w1.weight": (4096, 1024),
        f"{prefix}feed_forward.w3.weight": (4096, 1024),
        f"{prefix}feed_forward.w2.weight": (1024, 4096),
    }


def conv(name: str, channels: int, shape: tuple[int, ...]) -> Table:
    """A convolution with weight norm."""
    prefix = f"audio_tokenizer.{name}.conv.parametrizations.weight."
    return {f"{prefix}original0": (channels, 1, 1), f"{prefix}original1": shape}


def release_table() -> Table:
    """Specification section 2.2, written out."""
    table: Table = {
        "mm_audio_embeddings.tok_embeddings.weight": (131072, 3072),
        "mm_audio_embeddings.audio_codebook_embeddings.embeddings.weight": (9088, 3072),
        "norm.weight": (3072,),
        "acoustic_transformer.input_projection.weight": (3072, 36),
        "acoustic_transformer.time_projection.weight": (3072, 3072),
        "acoustic_transformer.llm_projection.weight": (3072, 3072),
        "acoustic_transformer.semantic_codebook_output.weight": (8320, 3072),
        "acoustic_transformer.acoustic_codebook_output.weight": (36, 3072),
        "acoustic_transformer.norm.weight": (3072,),
        "audio_tokenizer.quantizer.semantic_codebook.embedding_sum": (8192, 256),
        "audio_tokenizer.quantizer.semantic_codebook.cluster_usage": (8192,),
        **conv("decoder_blocks.0", 1024, (1024, 292, 3)),
        **conv("output_proj", 240, (240, 1024, 7)),
    }
    for layer in range(26):
        table |= block(f"layers.{layer}.")
    for layer in range(3):
        table |= block(f"acoustic_transformer.layers.{layer}.")
    for index in (2, 4, 6):
        table |= conv(f"decoder_blocks.{index}", 1024, (1024, 1024, 4))
    for index in (1, 3, 5, 7):
        for layer in range(2):
            table |= codec_layer(f"audio_tokenizer.decoder_blocks.{index}.layers.{layer}.")
    return table


@pytest.fixture
def release() -> VoxtralParams:
    """The release's params."""
    return parse_params(RELEASE)


def test_release_has_the_386_tensors_of_the_specification(release: VoxtralParams) -> None:
    """Names and shapes that follow from the release's params.json are those of the specification's table."""
    expected = release_table()

    assert len(expected) == 386
    assert expected_tensors(release) == expected


def test_release_file_has_the_known_size(release: VoxtralParams) -> None:
    """Data and header of a file of these tensors have exactly the bytes that the released file has."""
    header: dict[str, object] = {}
    end = 0
    for name, shape in sorted(expected_tensors(release).items()):
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = len(json.dumps(header, separators=(",", ":")))
    header_bytes = 8 + -(-text // 8) * 8

    assert end == 8_004_706_784
    assert header_bytes == 45_464
    assert end + header_bytes == 8_004_752_248


def test_codebook_sizes_may_be_given_as_a_list(release: VoxtralParams) -> None:
    """The alternative form of the codebook sizes leads to the same tensors."""
    tree = json.loads(json.dumps(RELEASE))
    audio = tree["multimodal"]["audio_model_args"]
    for key in ("semantic_codebook_size", "acoustic_codebook_size", "n_acoustic_codebook"):
        del audio[key]
    audio["codebook_sizes"] = ",".join(["8192", *["21"] * 36])

    assert expected_tensors(parse_params(tree)) == expected_tensors(release)


def test_thinker_of_the_release_runs_on_the_meta_device(release: VoxtralParams) -> None:
    """The 4B model is built from exactly the LLM tensors of the table, and prefill and decode fit together in shape."""
    meta = torch.device("meta")
    read: list[str] = []

    def tensors(prefix: str) -> dict[str, torch.Tensor]:
        names = [name for name in expected_tensors(release) if name.startswith(prefix)]
        read.extend(names)
        return {
            name.removeprefix(prefix): torch.empty(expected_tensors(release)[name], dtype=torch.bfloat16, device=meta)
            for name in names
        }

    thinker = Thinker.of(ThinkerWeights.read(release, tensors), release, 4608)
    cache = KeyValueCache(release.llm, 4, 4608, torch.bfloat16, meta)
    prompt = thinker.prefill(thinker.embed_tokens(torch.zeros(158, dtype=torch.int64, device=meta)), 0, cache)
    frames = thinker.embed_frames(torch.zeros(4, 37, dtype=torch.int64, device=meta))
    hidden = thinker.decode(frames, [DecodeRow(0, 158), DecodeRow(2, 4607)], cache, own_length=True)

    assert len(read) == len(set(read)) == 237
    assert prompt.shape == (158, 3072)
    assert hidden.shape == (4, 3072)
    assert hidden.dtype is torch.bfloat16
