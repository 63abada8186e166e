"""params.json of a Voxtral TTS checkpoint as dataclasses, and the names and shapes of every tensor that follow from it.

Source: specification of Voxtral TTS, sections 2.1 and 2.2. Knows no torch: pure numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stage_runtime.errors import CheckpointDamaged

# Every codebook reserves code 0 (EMPTY_AUDIO) and 1 (END_AUDIO); real codes are shifted by 2.
SPECIAL_CODES = 2
END_AUDIO = 1
TABLE_MULTIPLE = 128
DEFAULT_DECODING_STEPS = 7

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class TransformerParams:
    """Sizes of a stack of Mistral blocks (LLM and acoustic transformer)."""

    dim: int
    n_layers: int
    head_dim: int
    hidden_dim: int
    n_heads: int
    n_kv_heads: int
    norm_eps: float
    rope_theta: float
    use_biases: bool


@dataclass(frozen=True, slots=True)
class CodecParams:
    """Sizes of the audio tokenizer."""

    sampling_rate: int
    patch_size: int
    patch_kernel: int
    semantic_codebook_size: int
    semantic_dim: int
    acoustic_codebook_size: int
    acoustic_dim: int
    attn_window: int
    halve_window: bool
    dim: int
    hidden_dim: int
    head_dim: int
    n_heads: int
    n_kv_heads: int
    qk_norm: bool
    qk_norm_eps: float
    norm_eps: float
    layer_scale: bool
    transformer_lengths: tuple[int, ...]
    conv_kernels: tuple[int, ...]
    conv_strides: tuple[int, ...]
    encoder_conv_strides: tuple[int, ...]

    @property
    def latent_dim(self) -> int:
        """Channels of the decoder's input."""
        return self.semantic_dim + self.acoustic_dim

    @property
    def upsampling(self) -> int:
        """Patches that one frame becomes."""
        factor = 1
        for stride in self.conv_strides:
            factor *= stride
        return factor

    @property
    def samples_per_frame(self) -> int:
        """Samples that one frame becomes."""
        return self.patch_size * self.upsampling


@dataclass(frozen=True, slots=True)
class VoxtralParams:
    """A Voxtral TTS model. `acoustic_codebooks` is A; a frame has K = A + 1 codes."""

    llm: TransformerParams
    acoustic: TransformerParams
    codec: CodecParams
    vocab_size: int
    dtype: str
    semantic_codebook_size: int
    acoustic_codebook_size: int
    acoustic_codebooks: int
    audio_token_id: int
    begin_audio_token_id: int
    decoding_steps: int
    decoding_steps_stated: bool  # False: the key was absent and the default applies
    voices: tuple[str, ...]

    @property
    def codebook_count(self) -> int:
        """K: codes of one frame, semantic code included."""
        return self.acoustic_codebooks + 1

    @property
    def codebook_offsets(self) -> tuple[int, ...]:
        """First row of each codebook in the code table (section 6)."""
        sizes = self._code_counts()
        return tuple(sum(sizes[:index]) for index in range(len(sizes)))

    @property
    def code_table_rows(self) -> int:
        """Rows of the code table, padded to a multiple of 128."""
        return _round_up(sum(self._code_counts()))

    @property
    def semantic_head_rows(self) -> int:
        """Rows of the semantic head, padded to a multiple of 128."""
        return _round_up(self.semantic_codebook_size + SPECIAL_CODES)

    def _code_counts(self) -> list[int]:
        acoustic = self.acoustic_codebook_size + SPECIAL_CODES
        return [self.semantic_codebook_size + SPECIAL_CODES, *[acoustic] * self.acoustic_codebooks]


def read_params(directory: Path) -> VoxtralParams:
    """Read params.json of a checkpoint directory; raises CheckpointDamaged if it is missing or does not fit."""
    file = directory / "params.json"
    try:
        tree = json.loads(file.read_text())
    except FileNotFoundError:
        raise CheckpointDamaged(str(file), "is missing") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointDamaged(str(file), f"cannot be read as JSON: {error}") from error
    try:
        return parse_params(tree)
    except KeyError as error:
        raise CheckpointDamaged(str(file), f"has no key {error.args[0]!r}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointDamaged(str(file), str(error)) from error


def parse_params(tree: Mapping[str, Any]) -> VoxtralParams:
    """Parse the content of params.json; unknown keys are ignored. Raises KeyError or ValueError if it does not fit."""
    if tree.get("model_type") != "voxtral_tts" and not any(
        "VoxtralTTS" in str(name) for name in tree.get("architectures", ())
    ):
        raise ValueError(f"model_type is {tree.get('model_type')!r}; this loader reads 'voxtral_tts'")
    audio = tree["multimodal"]["audio_model_args"]
    semantic, acoustic_size, acoustic_count = _codebooks(audio)
    head = audio["acoustic_transformer_args"]
    if audio.get("input_embedding_concat_type", "sum") != "sum":
        raise ValueError(f"input_embedding_concat_type is {audio['input_embedding_concat_type']!r}; only 'sum' exists")
    llm = _transformer(tree, {"norm_eps": 1e-5, "rope_theta": 1e6})
    acoustic = _transformer(
        head,
        {
            "dim": 768,
            "n_layers": 3,
            "head_dim": 128,
            "hidden_dim": 2048,
            "n_heads": 6,
            "n_kv_heads": 2,
            "norm_eps": 1e-5,
        },
    )
    if acoustic.dim != llm.dim:
        raise ValueError(
            f"acoustic dim {acoustic.dim} must equal the LLM's dim {llm.dim}: the semantic head reads its hidden state"
        )
    if tree.get("use_biases"):
        raise ValueError("use_biases of the LLM is not supported")
    tokenizer = tree["multimodal"]["audio_tokenizer_args"]
    return VoxtralParams(
        llm=llm,
        acoustic=acoustic,
        codec=_codec(tokenizer),
        vocab_size=tree["vocab_size"],
        dtype=tree.get("dtype", "bfloat16"),
        semantic_codebook_size=semantic,
        acoustic_codebook_size=acoustic_size,
        acoustic_codebooks=acoustic_count,
        audio_token_id=audio.get("audio_token_id", 24),
        begin_audio_token_id=audio.get("begin_audio_token_id", 25),
        decoding_steps=_decoding_steps(head),
        decoding_steps_stated=head.get("n_decoding_steps") is not None,
        voices=tuple(tokenizer.get("voice", {})),
    )


def expected_tensors(params: VoxtralParams) -> Shapes:
    """Name and shape of every tensor that consolidated.safetensors must hold (section 2.2)."""
    shapes: Shapes = {
        "mm_audio_embeddings.tok_embeddings.weight": (params.vocab_size, params.llm.dim),
        "mm_audio_embeddings.audio_codebook_embeddings.embeddings.weight": (params.code_table_rows, params.llm.dim),
        "norm.weight": (params.llm.dim,),
    }
    for index in range(params.llm.n_layers):
        shapes |= _prefixed(f"layers.{index}.", _block(params.llm))
    shapes |= _prefixed("acoustic_transformer.", dict(_acoustic(params)))
    shapes |= _prefixed("audio_tokenizer.", dict(_codec_decoder(params.codec)))
    return shapes


def _acoustic(params: VoxtralParams) -> Iterator[tuple[str, tuple[int, ...]]]:
    head, dim = params.acoustic, params.acoustic.dim
    yield "input_projection.weight", (dim, params.acoustic_codebooks)
    yield "time_projection.weight", (dim, dim)
    yield "llm_projection.weight", (dim, dim)
    yield "semantic_codebook_output.weight", (params.semantic_head_rows, dim)
    if head.use_biases:
        yield "semantic_codebook_output.bias", (params.semantic_head_rows,)
    yield "acoustic_codebook_output.weight", (params.acoustic_codebooks, dim)
    yield "norm.weight", (dim,)
    for index in range(head.n_layers):
        yield from _prefixed(f"layers.{index}.", _block(head)).items()


def _codec_decoder(codec: CodecParams) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "quantizer.semantic_codebook.embedding_sum", (codec.semantic_codebook_size, codec.semantic_dim)
    yield "quantizer.semantic_codebook.cluster_usage", (codec.semantic_codebook_size,)
    for index, kind, level in decoder_blocks(codec):
        prefix = f"decoder_blocks.{index}."
        if kind == "transformer":
            for layer in range(codec.transformer_lengths[level]):
                yield from _prefixed(f"{prefix}layers.{layer}.", _codec_layer(codec)).items()
        else:
            channels = codec.latent_dim if kind == "conv" else codec.dim
            yield from _conv(f"{prefix}conv", codec.dim, channels, codec.conv_kernels[level])
    yield from _conv("output_proj.conv", codec.patch_size, codec.dim, codec.patch_kernel)


def decoder_blocks(codec: CodecParams) -> list[tuple[int, str, int]]:
    """(index, "conv" | "upsample" | "transformer", level) of each entry of decoder_blocks, in order (section 7.3)."""
    blocks: list[tuple[int, str, int]] = []
    for level, (kernel, stride) in enumerate(zip(codec.conv_kernels, codec.conv_strides, strict=True)):
        if level == 0:
            blocks.append((len(blocks), "conv", level))
        elif kernel != 1 or stride != 1:
            blocks.append((len(blocks), "upsample", level))
        blocks.append((len(blocks), "transformer", level))
    return blocks


def _conv(name: str, out_channels: int, in_channels: int, kernel: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.parametrizations.weight.original0", (out_channels, 1, 1)
    yield f"{name}.parametrizations.weight.original1", (out_channels, in_channels, kernel)


def _block(params: TransformerParams) -> Shapes:
    queries, keys = params.n_heads * params.head_dim, params.n_kv_heads * params.head_dim
    shapes: Shapes = {
        "attention.wq.weight": (queries, params.dim),
        "attention.wk.weight": (keys, params.dim),
        "attention.wv.weight": (keys, params.dim),
        "attention.wo.weight": (params.dim, queries),
        "attention_norm.weight": (params.dim,),
        "ffn_norm.weight": (params.dim,),
        "feed_forward.w1.weight": (params.hidden_dim, params.dim),
        "feed_forward.w3.weight": (params.hidden_dim, params.dim),
        "feed_forward.w2.weight": (params.dim, params.hidden_dim),
    }
    if params.use_biases:
        shapes |= {
            "attention.wq.bias": (queries,),
            "attention.wv.bias": (keys,),
            "attention.wo.bias": (params.dim,),
            "feed_forward.w2.bias": (params.dim,),
        }
    return shapes


def _codec_layer(codec: CodecParams) -> Shapes:
    queries, keys = codec.n_heads * codec.head_dim, codec.n_kv_heads * codec.head_dim
    shapes: Shapes = {
        "attention.wq.weight": (queries, codec.dim),
        "attention.wk.weight": (keys, codec.dim),
        "attention.wv.weight": (keys, codec.dim),
        "attention.wo.weight": (codec.dim, queries),
        "attention_norm.weight": (codec.dim,),
        "ffn_norm.weight": (codec.dim,),
        "feed_forward.w1.weight": (codec.hidden_dim, codec.dim),
        "feed_forward.w3.weight": (codec.hidden_dim, codec.dim),
        "feed_forward.w2.weight": (codec.dim, codec.hidden_dim),
    }
    if codec.qk_norm:
        shapes |= {"attention.q_norm.weight": (queries,), "attention.k_norm.weight": (keys,)}
    if codec.layer_scale:
        shapes |= {"attention_scale": (codec.dim,), "ffn_scale": (codec.dim,)}
    return shapes


def _prefixed(prefix: str, shapes: Mapping[str, tuple[int, ...]]) -> Shapes:
    return {prefix + name: shape for name, shape in shapes.items()}


def _transformer(tree: Mapping[str, Any], defaults: Mapping[str, Any]) -> TransformerParams:
    def value(key: str) -> Any:
        return tree[key] if key in tree or key not in defaults else defaults[key]

    return TransformerParams(
        dim=value("dim"),
        n_layers=value("n_layers"),
        head_dim=value("head_dim"),
        hidden_dim=value("hidden_dim"),
        n_heads=value("n_heads"),
        n_kv_heads=value("n_kv_heads"),
        norm_eps=float(value("norm_eps")),
        rope_theta=float(tree.get("rope_theta", defaults.get("rope_theta", 10_000.0))),
        use_biases=bool(tree.get("use_biases", False)),
    )


def _codec(tree: Mapping[str, Any]) -> CodecParams:
    if not tree.get("causal", True):
        raise ValueError("audio_tokenizer_args.causal is false; only causal codecs exist")
    if tree.get("use_biases", False):
        raise ValueError("audio_tokenizer_args.use_biases is true, which is not supported")
    if not tree.get("conv_weight_norm", True):
        raise ValueError("audio_tokenizer_args.conv_weight_norm is false, which is not supported")
    return CodecParams(
        sampling_rate=tree.get("sampling_rate", 24_000),
        patch_size=tree.get("pretransform_patch_size", 240),
        patch_kernel=tree.get("patch_proj_kernel_size", 7),
        semantic_codebook_size=tree.get("semantic_codebook_size", 8192),
        semantic_dim=tree.get("semantic_dim", 256),
        acoustic_codebook_size=tree.get("acoustic_codebook_size", 21),
        acoustic_dim=tree.get("acoustic_dim", 36),
        attn_window=tree.get("attn_sliding_window_size", 16),
        halve_window=tree.get("half_attn_window_upon_downsampling", True),
        dim=tree.get("dim", 1024),
        hidden_dim=tree.get("hidden_dim", 4096),
        head_dim=tree.get("head_dim", 128),
        n_heads=tree.get("n_heads", 8),
        n_kv_heads=tree.get("n_kv_heads", 8),
        qk_norm=tree.get("qk_norm", True),
        qk_norm_eps=float(tree.get("qk_norm_eps", 1e-6)),
        norm_eps=float(tree.get("norm_eps", 0.01)),
        layer_scale=tree.get("layer_scale", True),
        transformer_lengths=_integers(tree.get("decoder_transformer_lengths_str", "2,2,2,2")),
        conv_kernels=_integers(tree.get("decoder_convs_kernels_str", "3,4,4,4")),
        conv_strides=_integers(tree.get("decoder_convs_strides_str", "1,2,2,2")),
        encoder_conv_strides=_integers(tree.get("encoder_convs_strides_str", "2,2,2,1")),
    )


def _codebooks(audio: Mapping[str, Any]) -> tuple[int, int, int]:
    if sizes := audio.get("codebook_sizes"):
        parsed = _integers(sizes)
        return parsed[0], parsed[1], len(parsed) - 1
    return audio["semantic_codebook_size"], audio["acoustic_codebook_size"], audio["n_acoustic_codebook"]


def _decoding_steps(head: Mapping[str, Any]) -> int:
    steps = head.get("n_decoding_steps")
    if steps is None:
        return DEFAULT_DECODING_STEPS
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"n_decoding_steps is {steps!r}; it must be a whole number of at least 1")
    return steps


def _integers(value: str | list[int] | tuple[int, ...]) -> tuple[int, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    return tuple(int(part) for part in parts)


def _round_up(count: int) -> int:
    return -(-count // TABLE_MULTIPLE) * TABLE_MULTIPLE
