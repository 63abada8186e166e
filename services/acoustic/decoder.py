"""An acoustic head made ready to serve: warmed up, and laid out in the row counts that settings and device call for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.acoustic.batching import RowFunction, RowSpec, Tensors, at_most, in_blocks, invariant_sizes
from services.acoustic.graphs import BucketedGraphs, CudaCapture
from services.acoustic.model import AcousticHead, FrameInputs, Frames
from services.acoustic.settings import AcousticSettings
from stage_runtime.logs import get_logger

_log = get_logger(__name__)

# Measured with one thread on models of width 48 and 256: 4 is the smallest count at which all places of a row agree, costs a fifth
# more than one row, and 8, 16 and 32 give the same bits. On CUDA a step is bound by reading the weights: padding is nearly free.
INVARIANT_ROWS_CPU = 4
INVARIANT_ROWS_CUDA = 32

_PADDING_ALPHA = 1.2
_PROBE_COUNT = 2


@dataclass(frozen=True, slots=True)
class FrameDecoder:
    """Computes frames of any number of rows. `sizes` are the row counts in use with batch_invariant, else empty."""

    head: AcousticHead
    compute: RowFunction
    sizes: tuple[int, ...]
    graphs: BucketedGraphs | None

    def __call__(self, inputs: FrameInputs) -> Frames:
        """Frames of these rows, on the head's device."""
        device = self.head.weights.device
        return Frames(*self.compute(*(tensor.to(device) for tensor in inputs)))


def make_decoder(head: AcousticHead, settings: AcousticSettings, *, batch_invariant: bool) -> FrameDecoder:
    """Choose row counts, warm up, and capture graphs on CUDA."""
    specs = input_specs(head)
    device = head.weights.device
    sizes = _choose_sizes(head, settings) if batch_invariant else ()
    eager = in_blocks(head.frames, specs, sizes) if sizes else at_most(head.frames, settings.max_batch)
    if device.type == "cuda" and settings.graphs:
        buckets = sizes or settings.graph_buckets
        graphs = BucketedGraphs(head.frames, specs, buckets, CudaCapture(device), eager=eager)
        graphs.warm_up()
        return FrameDecoder(head, graphs, sizes, graphs)
    eager(*(spec.rows(1, device) for spec in specs))
    return FrameDecoder(head, eager, sizes, None)


def input_specs(head: AcousticHead) -> tuple[RowSpec, ...]:
    """Shapes and padding of FrameInputs, in its order."""
    dtype = head.weights.dtype
    return (
        RowSpec((head.params.acoustic.dim,), dtype, 0.0),
        RowSpec((1,), dtype, _PADDING_ALPHA),
        RowSpec((head.params.acoustic_codebooks,), dtype, 0.0),
        RowSpec((), torch.bool, fill=True),
    )


def _choose_sizes(head: AcousticHead, settings: AcousticSettings) -> tuple[int, ...]:
    """Row counts at which a row gets the same bits wherever it stands; on CUDA the first of them alone."""
    on_cpu = head.weights.device.type == "cpu"
    default = min(INVARIANT_ROWS_CPU if on_cpu else INVARIANT_ROWS_CUDA, settings.max_batch)
    sizes = invariant_sizes(
        lambda *row: (head.semantic_logits(row[0]), *head.frames(*row)),
        _probes(head),
        first=settings.invariant_rows or default,
        limit=settings.max_batch,
        several=on_cpu,
    )
    if sizes == (1,):
        _log.warning(
            "batch_invariance_without_batching", reason="in no row count do all places of a row get the same bits"
        )
    else:
        _log.info("batch_invariant_row_counts", sizes=sizes)
    return sizes


def _probes(head: AcousticHead) -> list[Tensors]:
    generator = torch.Generator().manual_seed(0)
    device = head.weights.device

    def row(spec: RowSpec) -> torch.Tensor:
        if spec.dtype is torch.bool:
            return spec.rows(1, device)
        return torch.randn(1, *spec.shape, generator=generator).to(device, spec.dtype)

    return [tuple(row(spec) for spec in input_specs(head)) for _ in range(_PROBE_COUNT)]
