"""Loading of the acoustic head: strictness, real sizes on the meta device, biases, and unusual shapes against the plain formulas."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows

from benchmarks import plain_acoustic, voxtral_4b
from services.acoustic.model import AcousticHead, AcousticWeights
from services.acoustic.model.weights import PREFIX, Linear
from services.voxtral.params import VoxtralParams, expected_tensors
from stage_runtime.errors import CheckpointDamaged

Tensors = dict[str, torch.Tensor]


def test_real_sizes_fit_together_on_the_meta_device() -> None:
    """The released model's 33 acoustic tensors, 0.394 G numbers, make a head whose outputs have the right shapes."""
    params = voxtral_4b.params()
    shapes = {n.removeprefix(PREFIX): s for n, s in expected_tensors(params).items() if n.startswith(PREFIX)}
    tensors = {name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in shapes.items()}
    assert len(tensors) == 33
    assert 0.393e9 < sum(tensor.numel() for tensor in tensors.values()) < 0.395e9

    head = AcousticHead.of(AcousticWeights.from_tensors(tensors, params), params)
    rows = (torch.empty(3, width, dtype=torch.bfloat16, device="meta") for width in (3072, 1, 36))
    frames = head.frames(*rows, torch.empty(3, dtype=torch.bool, device="meta"))

    assert head.weights.semantic.weight.shape == (8193, 3072)
    assert (frames.codes.shape, frames.codes.dtype) == ((3, 37), torch.int32)
    assert (frames.latents.shape, frames.latents.dtype) == ((3, 36), torch.bfloat16)
    assert (frames.finite.shape, frames.finite.dtype) == ((3,), torch.bool)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda tensors: tensors.pop("norm.weight"), "norm.weight: is missing"),
        (lambda tensors: tensors.update({"layers.9.x": torch.ones(1)}), "layers.9.x: is no tensor of this model"),
        (
            lambda tensors: tensors.update({"norm.weight": torch.ones(47)}),
            r"has shape \(47,\); params.json asks for \(48,\)",
        ),
    ],
    ids=["missing", "unknown", "shape"],
)
def test_tensors_that_do_not_fit_are_refused(
    make_params: Callable[..., VoxtralParams],
    random_tensors: Callable[..., Tensors],
    change: Callable[[Tensors], object],
    text: str,
) -> None:
    """A missing tensor, an unknown one or a wrong shape is damage, and the message names it."""
    params = make_params()
    tensors = random_tensors(params)
    change(tensors)

    with pytest.raises(CheckpointDamaged, match=text):
        AcousticWeights.from_tensors(tensors, params)


def test_loading_leaves_the_given_tensors_alone(
    make_params: Callable[..., VoxtralParams], random_tensors: Callable[..., Tensors]
) -> None:
    """The mapping still holds every tensor afterwards."""
    params = make_params()
    tensors = random_tensors(params)

    AcousticWeights.from_tensors(tensors, params)

    assert tensors.keys() == random_tensors(params).keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "changes",
    [
        {"n_layers": 1},
        {"n_layers": 2},
        {"n_layers": 4, "use_biases": True},
        {"n_layers": 1, "use_biases": True},
        {"n_kv_heads": 4},
        {"n_heads": 3, "n_kv_heads": 1, "head_dim": 8, "hidden_dim": 40},
        {"n_decoding_steps": 1},
    ],
    ids=["one block", "two blocks", "biases", "one block with biases", "no grouping", "odd sizes", "one step"],
)
def test_hoisted_head_agrees_with_the_plain_formulas(
    make_params: Callable[..., VoxtralParams],
    random_tensors: Callable[..., Tensors],
    make_inputs: Callable[..., tuple[torch.Tensor, ...]],
    changes: dict[str, object],
    dtype: torch.dtype,
) -> None:
    """Leaving out what is the same for all rows or steps changes no code, whatever the shape of the model."""
    params = make_params(**changes)
    tensors = random_tensors(params, dtype)
    head = AcousticHead.of(AcousticWeights.from_tensors(tensors, params), params)
    hidden, alpha, noise, _ = make_inputs(head, 6)

    codes = head.frames(hidden, alpha, noise, torch.ones(6, dtype=torch.bool)).codes
    plain = plain_acoustic.frames(tensors, params, hidden, alpha, noise)

    if dtype is torch.float32:
        assert torch.equal(codes, plain)
    else:
        assert (codes - plain).abs().max() <= 1
        assert (codes == plain).float().mean() > 0.9
    assert len(codes[:, 1:].unique()) > 4


@pytest.mark.parametrize("bias", [None, torch.linspace(-1, 1, 1024)], ids=["plain", "bias"])
def test_large_matrices_are_multiplied_alike(bias: torch.Tensor | None) -> None:
    """From a megabyte-size matrix on another product order is used, with the same result for any row count and for strided rows."""
    weight = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))
    layer = Linear.of(weight, bias)
    assert layer.columns
    assert not Linear.of(weight[:1023]).columns
    assert not Linear.of(weight.bfloat16()).columns

    for rows in (1, 2, 7, 24):
        x = torch.randn(rows, 2048, generator=torch.Generator().manual_seed(rows))[:, ::2]
        y = layer(x)
        assert y.is_contiguous()
        torch.testing.assert_close(y, F.linear(x, weight, bias), atol=2e-4, rtol=1e-5)
