"""Replaying a model function as CUDA graphs, one for each bucket of row counts (specification of Voxtral TTS, section 9).

A step of the acoustic head is some hundred small kernels; launched one by one they cost more than they compute. Captured once with
static inputs and replayed, they cost one launch. Knows nothing of the model: any function over rows will do (see batching).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from services.acoustic.batching import Block, RowFunction, RowSpec, Tensors, join, split_rows
from stage_runtime.logs import get_logger

_log = get_logger(__name__)


class CaptureBackend(Protocol):
    """What records a run and repeats it: CudaCapture, or HostCapture where there is no CUDA."""

    @property
    def device(self) -> torch.device:
        """Where the static inputs are."""

    def capturing(self) -> bool:
        """Whether the current stream is being captured, by whomever. Replays are illegal then."""

    def warm_up(self, run: Callable[[], Tensors]) -> None:
        """Run once without recording, and wait until it is done: kernels are chosen and workspaces allocated."""

    def capture(self, run: Callable[[], Tensors]) -> tuple[Callable[[], None], Tensors]:
        """Record a run. Gives what repeats it and the static outputs. Raises RuntimeError if it cannot be recorded."""


class CudaCapture:
    """torch.cuda.CUDAGraph on a stream of its own; all graphs share one memory pool, as only one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def capturing(self) -> bool:
        """See CaptureBackend."""
        return torch.cuda.is_current_stream_capturing()

    def warm_up(self, run: Callable[[], Tensors]) -> None:
        """See CaptureBackend."""
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            run()
        current.wait_stream(self._stream)
        torch.cuda.synchronize(self.device)

    def capture(self, run: Callable[[], Tensors]) -> tuple[Callable[[], None], Tensors]:
        """See CaptureBackend."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            outputs = run()
        return graph.replay, outputs


class HostCapture:
    """The same contract without CUDA: static inputs and outputs, and the function run again. Saves nothing; for tests.

    `capturing` answers as a stream under capture would; None: never.
    """

    def __init__(self, capturing: Callable[[], bool] | None = None) -> None:
        self.device = torch.device("cpu")
        self._capturing = capturing

    def capturing(self) -> bool:
        """See CaptureBackend."""
        return self._capturing is not None and self._capturing()

    def warm_up(self, run: Callable[[], Tensors]) -> None:
        """See CaptureBackend."""
        run()

    def capture(self, run: Callable[[], Tensors]) -> tuple[Callable[[], None], Tensors]:
        """See CaptureBackend."""
        static = tuple(output.clone() for output in run())

        def replay() -> None:
            for output, value in zip(static, run(), strict=True):
                output.copy_(value)

        return replay, static


@dataclass(slots=True)
class GraphCounters:
    """What a BucketedGraphs has done. `replays` counts by bucket."""

    replays: Counter[int] = field(default_factory=Counter)
    eager_calls: int = 0
    padding_rows: int = 0


@dataclass(frozen=True, slots=True)
class _Graph:
    """One captured bucket. The addresses of `inputs` and `outputs` are burnt in."""

    inputs: Tensors
    outputs: Tensors
    replay: Callable[[], None]


class BucketedGraphs:
    """A model function that is replayed where it can be, and called where it cannot.

    Batches are rounded up to the next captured bucket; larger ones than the largest are split over buckets. A bucket that cannot be
    captured is left out. If none is captured, or anything else goes wrong, every call is eager from then on; all of that is told in one
    warning. Calls while the current stream is being captured are eager, since a replay inside a capture is illegal.
    """

    def __init__(
        self,
        function: RowFunction,
        specs: Sequence[RowSpec],
        buckets: Sequence[int],
        backend: CaptureBackend,
        *,
        eager: RowFunction | None = None,
    ) -> None:
        """`buckets` are sorted row counts. `eager` computes what cannot be replayed; None: `function` itself."""
        self.counters = GraphCounters()
        self._function = function
        self._eager = eager or function
        self._specs = tuple(specs)
        self._buckets = tuple(buckets)
        self._backend = backend
        self._graphs: dict[int, _Graph] = {}
        self._warmed_up = False

    @property
    def captured(self) -> tuple[int, ...]:
        """The buckets that are replayed, sorted; empty if every call is eager."""
        return tuple(self._graphs)

    def warm_up(self) -> None:
        """Run every bucket eagerly, then capture each. To be called once; another call does nothing but warn."""
        if self._warmed_up:
            _log.warning("graphs_already_captured", buckets=self.captured)
            return
        self._warmed_up = True
        inputs = {size: tuple(spec.rows(size, self._backend.device) for spec in self._specs) for size in self._buckets}
        try:
            for rows in inputs.values():
                self._backend.warm_up(self._run_of(rows))
        except RuntimeError as error:
            self._disable(error)
            return
        failures: dict[int, str] = {}
        for size, rows in inputs.items():
            try:
                self._graphs[size] = self._capture(rows)
            except RuntimeError as error:
                failures[size] = str(error)
        if failures and self._graphs:
            _log.warning("graph_buckets_left_out", captured=self.captured, failures=failures)
        elif failures:
            self._disable(RuntimeError(next(iter(failures.values()))))

    def __call__(self, *inputs: torch.Tensor) -> Tensors:
        """The function's outputs for these rows, never sharing memory with a graph."""
        if not self._graphs or self._backend.capturing():
            return self._call_eagerly(inputs)
        try:
            return join([self._replay(block, inputs) for block in split_rows(inputs[0].shape[0], self.captured)])
        except RuntimeError as error:
            self._disable(error)
            return self._call_eagerly(inputs)

    def _run_of(self, rows: Tensors) -> Callable[[], Tensors]:
        return lambda: self._function(*rows)

    def _capture(self, rows: Tensors) -> _Graph:
        run = self._run_of(rows)
        self._backend.warm_up(run)
        replay, outputs = self._backend.capture(run)
        return _Graph(rows, outputs, replay)

    def _replay(self, block: Block, inputs: Tensors) -> Tensors:
        graph = self._graphs[block.size]
        for static, spec, tensor in zip(graph.inputs, self._specs, inputs, strict=True):
            static[: block.count].copy_(tensor[block.start : block.start + block.count])
            static[block.count :].fill_(spec.fill)
        graph.replay()
        self.counters.replays[block.size] += 1
        self.counters.padding_rows += block.size - block.count
        return tuple(output[: block.count].clone() for output in graph.outputs)

    def _call_eagerly(self, inputs: Tensors) -> Tensors:
        self.counters.eager_calls += 1
        return self._eager(*inputs)

    def _disable(self, error: RuntimeError) -> None:
        self._graphs.clear()
        _log.warning("graphs_disabled", reason=str(error), consequence="every step launches its kernels one by one")
