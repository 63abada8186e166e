"""The decoder at other sizes against the formulas written down plainly; loading; reach; memory; the real sizes."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows
from torch.profiler import ProfilerActivity, profile

from benchmarks import voxtral_4b
from services.codec.model import PREFIX, CodecDecoder, CodecWeights, left_reach_frames
from services.codec.model.attention import MAX_MASKS, WHOLE_STEPS, WindowedAttention, alibi_slopes
from services.codec.model.geometry import attention_windows
from services.voxtral.params import CodecParams, VoxtralParams, decoder_blocks, expected_tensors
from stage_runtime.errors import CheckpointDamaged

Tensors = dict[str, torch.Tensor]
MakeParams = Callable[..., VoxtralParams]
RandomTensors = Callable[..., Tensors]

# Sizes that differ from the golden model's in every respect that the decoder looks at.
SIZES = {
    "golden": {},
    "grouped_queries_six_heads": {"n_heads": 6, "n_kv_heads": 2},
    "short_kernels": {"decoder_convs_kernels_str": "3,2,2,2", "attn_sliding_window_size": 32},
    "odd_kernels": {"decoder_convs_kernels_str": "5,3,5,7", "patch_proj_kernel_size": 5},
    "no_norms_no_scales": {"qk_norm": False, "layer_scale": False},
    "one_window_for_all": {"half_attn_window_upon_downsampling": False, "attn_sliding_window_size": 20},
    "no_block_between": {
        "decoder_convs_kernels_str": "3,4,1,4",
        "decoder_convs_strides_str": "1,4,1,2",
        "encoder_convs_strides_str": "2,4,1,1",
        "decoder_transformer_lengths_str": "1,3,2,1",
    },
}


def plain_decode(tensors: Tensors, codec: CodecParams, codes: torch.Tensor) -> torch.Tensor:
    """Samples of codes (T, K), by the formulas of section 7 and torch's own convolutions, channel-major, in float64."""
    t = {name: value.double() for name, value in tensors.items()}

    def folded(name: str) -> torch.Tensor:
        v = t[f"{name}.parametrizations.weight.original1"]
        return t[f"{name}.parametrizations.weight.original0"] * v / v.pow(2).sum(dim=(1, 2), keepdim=True).sqrt()

    usage = t["quantizer.semantic_codebook.cluster_usage"].clamp(min=1e-5)
    semantic = (t["quantizer.semantic_codebook.embedding_sum"] / usage[:, None])[codes[:, 0] - 2]
    acoustic = (codes[:, 1:] - 2).double() * 2 / (codec.acoustic_codebook_size - 1) - 1
    x = torch.cat([semantic, acoustic], dim=1).T[None]
    windows = attention_windows(codec)
    for index, kind, level in decoder_blocks(codec):
        name = f"decoder_blocks.{index}"
        if kind == "conv":
            x = F.conv1d(F.pad(x, (codec.conv_kernels[level] - 1, 0), mode="replicate"), folded(f"{name}.conv"))
        elif kind == "upsample":
            stride = codec.conv_strides[level]
            x = F.conv_transpose1d(x, folded(f"{name}.conv"), stride=stride)[..., : x.shape[2] * stride]
        else:
            for layer in range(codec.transformer_lengths[level]):
                weights = {key.removeprefix(f"{name}.layers.{layer}."): value for key, value in t.items()}
                x = plain_layer(weights, codec, x[0].T, windows[level]).T[None]
    kernel = codec.patch_kernel
    x = F.conv1d(F.pad(x, (kernel - 1, 0), mode="reflect"), folded("output_proj.conv"))
    return x[0].T.flatten()


def plain_layer(w: Tensors, codec: CodecParams, x: torch.Tensor, window: int) -> torch.Tensor:
    """One transformer layer on (T, dim), query by query."""

    def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return x / (x.pow(2).mean(dim=-1, keepdim=True) + eps).sqrt() * weight

    y = norm(x, w["attention_norm.weight"], codec.norm_eps)
    q, k, v = (y @ w[f"attention.{name}.weight"].T for name in ("wq", "wk", "wv"))
    if codec.qk_norm:
        q = norm(q, w["attention.q_norm.weight"], codec.qk_norm_eps)
        k = norm(k, w["attention.k_norm.weight"], codec.qk_norm_eps)
    q, k, v = (part.unflatten(1, (-1, codec.head_dim)) for part in (q, k, v))
    out = torch.empty_like(q)
    for head, slope in enumerate(alibi_slopes(codec.n_heads).tolist()):
        shared = head * codec.n_kv_heads // codec.n_heads
        for i in range(len(x)):
            keys = range(max(0, i - window), i + 1)
            scores = k[keys.start : i + 1, shared] @ q[i, head] / math.sqrt(codec.head_dim)
            scores += slope * torch.tensor([j - i for j in keys])
            out[i, head] = scores.softmax(dim=0) @ v[keys.start : i + 1, shared]
    x = x + w.get("attention_scale", 1.0) * (out.flatten(1) @ w["attention.wo.weight"].T)
    y = norm(x, w["ffn_norm.weight"], codec.norm_eps)
    gate = F.silu(y @ w["feed_forward.w1.weight"].T) * (y @ w["feed_forward.w3.weight"].T)
    return x + w.get("ffn_scale", 1.0) * (gate @ w["feed_forward.w2.weight"].T)


def build(tensors: Tensors, params: VoxtralParams, dtype: torch.dtype = torch.float32) -> CodecDecoder:
    """A decoder of these tensors."""
    return CodecDecoder.of(CodecWeights.from_tensors(tensors, params, dtype), params.codec)


@pytest.mark.parametrize("frames", [1, 2, 11, 40])
@pytest.mark.parametrize("changes", SIZES.values(), ids=SIZES)
def test_decoder_is_the_plain_formulas(
    make_params: MakeParams, random_tensors: RandomTensors, random_codes, changes: dict[str, object], frames: int
) -> None:
    """Whatever the sizes; 40 frames are long enough for attention in blocks, at the last level at least."""
    params = make_params(**changes)
    tensors = random_tensors(params)
    codes = random_codes(frames)

    wave = build(tensors, params)(codes[None])[0]

    expected = plain_decode(tensors, params.codec, codes)
    assert wave.shape == (frames * params.codec.samples_per_frame,)
    assert (wave - expected).norm() < 2e-5 * expected.norm()


@pytest.mark.parametrize("length", [1, 16, WHOLE_STEPS, WHOLE_STEPS + 1, 80, 96, 333])
@pytest.mark.parametrize("window", [2, 16, 33])
def test_attention_in_blocks_is_attention_as_a_whole(length: int, window: int) -> None:
    """Blocks, their left keys and the padding at both ends change nothing."""
    generator = torch.Generator().manual_seed(length)
    q, k, v = (torch.randn(2, length, 6, 8, generator=generator) for _ in range(3))
    distance = torch.arange(length) - torch.arange(length)[:, None]
    bias = alibi_slopes(6)[:, None, None] * distance
    bias = bias.masked_fill((distance > 0) | (distance < -window), -math.inf)
    expected = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (q, k, v)), attn_mask=bias, scale=1)

    out = WindowedAttention(alibi_slopes(6))(q, k, v, window)

    torch.testing.assert_close(out, expected.transpose(1, 2).flatten(2), atol=2e-6, rtol=1e-5)


def test_masks_kept_are_bounded() -> None:
    """However many lengths come, only the latest masks stay."""
    attend = WindowedAttention(alibi_slopes(2))
    for window in range(1, MAX_MASKS):
        for length in (1, 2):
            x = torch.ones(1, length, 2, 4)
            attend(x, x, x, window)

    assert len(attend._masks) == MAX_MASKS
    assert next(reversed(attend._masks)).window == MAX_MASKS - 1


@pytest.mark.parametrize("changes", [SIZES["golden"], SIZES["short_kernels"]], ids=["golden", "short_kernels"])
def test_reach_is_exact(
    make_params: MakeParams, random_tensors: RandomTensors, random_codes, changes: dict[str, object]
) -> None:
    """Another frame 0 changes the samples of frame `left_reach_frames`, and none after."""
    params = make_params(**changes)
    decoder = build(random_tensors(params), params)
    reach = left_reach_frames(params.codec)
    codes = random_codes(reach + 4)
    others = codes.clone()
    others[0] = random_codes(1, seed=9)

    changed = (decoder(codes[None]) != decoder(others[None]))[0].reshape(reach + 4, -1).any(dim=1)

    assert changed.tolist() == [True] * (reach + 1) + [False] * 3


@pytest.mark.parametrize(
    ("changes", "reach"),
    [
        ({}, 2 + 4 * 4 + 1 + 0.5 + 0.25 + 6 / 8),
        (SIZES["short_kernels"], 2 + 4 * 8 + 6 / 8),  # windows of four frames
        ({"decoder_transformer_lengths_str": "1,1,1,2"}, 2 + 5 * 2 + 1 + 0.5 + 0.25 + 6 / 8),
    ],
    ids=["golden", "short_kernels", "fewer_layers"],
)
def test_reach_follows_from_the_sizes(make_params: MakeParams, changes: dict[str, object], reach: float) -> None:
    """Convolutions and windows add up, in frames, rounded up."""
    reach = math.ceil(reach)

    assert left_reach_frames(make_params(**changes).codec) == reach


def test_samples_do_not_depend_on_what_follows(decoder: CodecDecoder, random_codes) -> None:
    """The decoder is causal: the samples of five frames are those that ten frames begin with."""
    codes = random_codes(10)

    torch.testing.assert_close(decoder(codes[None, :5])[0], decoder(codes[None])[0, : 5 * 1920], atol=5e-6, rtol=0)


def test_memory_grows_with_the_length_alone(decoder: CodecDecoder, random_codes) -> None:
    """No operation on 400 frames needs 10 MB; scores of each of 3200 steps with each would take 160 MB."""
    codes = random_codes(400)[None]

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        decoder(codes)

    assert 1e6 < max(event.cpu_memory_usage for event in profiler.events()) < 10e6


def test_real_sizes_fit_together_on_the_meta_device() -> None:
    """The released model's 116 codec tensors make a decoder whose samples have the right shape; nothing is left over."""
    params = voxtral_4b.params()
    shapes = {n.removeprefix(PREFIX): s for n, s in expected_tensors(params).items() if n.startswith(PREFIX)}
    tensors = {name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in shapes.items()}
    assert len(tensors) == 116

    decoder = build(tensors, params, torch.bfloat16)
    wave = decoder(torch.empty(2, 50, 37, dtype=torch.int64, device="meta"))

    assert (wave.shape, wave.dtype) == ((2, 50 * 1920), torch.float32)
    assert left_reach_frames(params.codec) == 21
    assert attention_windows(params.codec) == (2, 4, 8, 16)
    assert _numbers(decoder.weights) == _kept_numbers(shapes)


def _numbers(weights: CodecWeights) -> int:
    """Numbers in a decoder's weights, but for the slopes."""
    found = [weights.semantic_table, weights.output.weight]
    for level in weights.levels:
        found += [level.conv.weight] if level.conv is not None else []
        for layer in level.layers:
            found += [getattr(layer, name) for name in layer.__slots__]
    return sum(tensor.numel() for tensor in found)


def _kept_numbers(shapes: dict[str, tuple[int, ...]]) -> int:
    """Numbers in the checkpoint, but for those that are folded into others."""
    folded = ("original0", "cluster_usage", "attention_scale", "ffn_scale")
    return sum(math.prod(shape) for name, shape in shapes.items() if not name.endswith(folded))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda tensors: tensors.pop("output_proj.conv.parametrizations.weight.original0"), "original0: is missing"),
        (lambda tensors: tensors.update({"decoder_blocks.9.x": torch.ones(1)}), "9.x: is no tensor of this model"),
        (
            lambda tensors: tensors.update({"quantizer.semantic_codebook.cluster_usage": torch.ones(93)}),
            r"has shape \(93,\); params.json asks for \(94,\)",
        ),
    ],
    ids=["missing", "unknown", "shape"],
)
def test_tensors_that_do_not_fit_are_refused(
    make_params: MakeParams, random_tensors: RandomTensors, change: Callable[[Tensors], object], text: str
) -> None:
    """A missing tensor, an unknown one or a wrong shape is damage, and the message names it."""
    params = make_params()
    tensors = random_tensors(params)
    change(tensors)

    with pytest.raises(CheckpointDamaged, match=text):
        CodecWeights.from_tensors(tensors, params, torch.float32)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"semantic_codebook_size": 93}, "semantic_codebook_size is 93, but the model makes codes for 94"),
        ({"acoustic_codebook_size": 11}, "acoustic_codebook_size is 11, but the model makes codes for 21"),
        ({"acoustic_dim": 5}, "acoustic_dim is 5, but the model makes codes for 6"),
        ({"patch_proj_kernel_size": 9}, "patch_proj_kernel_size is 9; at most the 8 patches of a frame"),
    ],
    ids=["semantic", "levels", "books", "kernel"],
)
def test_sizes_that_cannot_serve_the_model_are_refused(
    make_params: MakeParams, random_tensors: RandomTensors, changes: dict[str, object], text: str
) -> None:
    """A codec that does not know the model's codes, or that would have to wait for later frames."""
    params = make_params(**changes)

    with pytest.raises(CheckpointDamaged, match=text):
        CodecWeights.from_tensors(random_tensors(params), params, torch.float32)


def test_bfloat16_keeps_folding_and_tables_in_float32(make_decoder: Callable[..., CodecDecoder]) -> None:
    """Only the results are cast: each weight of the bfloat16 decoder is the float32 one, rounded once."""
    exact, rounded = make_decoder(), make_decoder(torch.bfloat16)

    assert rounded.weights.slopes.dtype is torch.float32
    assert torch.equal(rounded.weights.semantic_table, exact.weights.semantic_table.bfloat16())
    assert torch.equal(rounded.acoustic_values, exact.acoustic_values.bfloat16())
    for ours, theirs in zip(rounded.weights.levels, exact.weights.levels, strict=True):
        assert ours.conv is not None
        assert theirs.conv is not None
        assert torch.equal(ours.conv.weight, theirs.conv.weight.bfloat16())
        for layer, other in zip(ours.layers, theirs.layers, strict=True):
            for name in layer.__slots__:
                assert torch.equal(getattr(layer, name), getattr(other, name).bfloat16()), name
