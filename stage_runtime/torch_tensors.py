"""Wire rows to torch tensors and back; kept apart so that the router and the clients never import torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stage_runtime.tensors import DType, Rows, concatenate

_TO_TORCH = {
    DType.F32: torch.float32,
    DType.F16: torch.float16,
    DType.BF16: torch.bfloat16,
    DType.I32: torch.int32,
    DType.I64: torch.int64,
    DType.U8: torch.uint8,
}
_FROM_TORCH = {torch_type: dtype for dtype, torch_type in _TO_TORCH.items()}


def torch_type(dtype: DType) -> torch.dtype:
    """The torch type of a wire type."""
    return _TO_TORCH[dtype]


def wire_type(dtype: torch.dtype) -> DType:
    """The wire type of a torch type; raises ValueError if there is none."""
    try:
        return _FROM_TORCH[dtype]
    except KeyError:
        raise ValueError(f"{dtype} has no wire type") from None


def to_torch(rows: Rows, device: torch.device | str = "cpu") -> torch.Tensor:
    """A new tensor [rows, *row_shape] on `device`; never shares the wire's buffer."""
    shape = (rows.row_count, *rows.row_shape)
    if not len(rows.data):
        return torch.empty(shape, dtype=_TO_TORCH[rows.dtype], device=device)
    return torch.frombuffer(bytearray(rows.data), dtype=_TO_TORCH[rows.dtype]).reshape(shape).to(device)


def stack(parts: Sequence[Rows], device: torch.device | str = "cpu") -> torch.Tensor:
    """The rows of several requests, one part each, as one tensor [rows, *row_shape] on `device`."""
    return to_torch(concatenate(parts), device)


def from_torch(tensor: torch.Tensor, *, row_counts: Sequence[int] | None = None) -> Rows:
    """Rows of a tensor [rows, ...]; copies it to the host. Raises ValueError if its type has no wire type."""
    host = tensor.detach().contiguous().cpu()
    raw = host.reshape(-1).view(torch.uint8).numpy().tobytes() if host.numel() else b""
    counts = None if row_counts is None else tuple(row_counts)
    return Rows(wire_type(tensor.dtype), tuple(host.shape[1:]), raw, counts)
