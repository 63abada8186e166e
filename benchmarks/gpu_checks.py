"""Checks that need a CUDA device, in one command for any such machine: captured graphs against eager runs, and CUDA against golden values.

    python -m benchmarks.gpu_checks

Prints a line for each check and a JSON report. Exit code 0: all passed; 1: some failed; 3: there is no CUDA device.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks import common, voxtral_4b
from omnistage.stage.v1 import stage_pb2
from services.acoustic.batching import RowFunction, RowSpec, Tensors, in_blocks, split_rows
from services.acoustic.decoder import input_specs
from services.acoustic.engine import create_engine as create_acoustic
from services.acoustic.graphs import BucketedGraphs, CaptureBackend, CudaCapture
from services.acoustic.model import AcousticHead, AcousticWeights
from services.acoustic.model.weights import PREFIX
from services.thinker.engine import create_engine as create_thinker
from services.voxtral.checkpoint import open_checkpoint
from services.voxtral.params import expected_tensors
from stage_runtime.config import StageSettings
from stage_runtime.engine import Next, StageRequest, Work
from stage_runtime.tensors import Rows
from stage_runtime.torch_tensors import from_torch, to_torch

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "models" / "embedded" / "voxtral-golden"
GOLDEN = ROOT / "tests" / "golden" / "voxtral"

BUCKETS = (1, 2, 4, 8, 16, 32)
BATCHES = range(1, 41)
VELOCITY_TOLERANCE = 1e-5
GOLDEN_TOLERANCE = 5e-5  # float32 on another device than the one that made the vectors
NO_DEVICE = 3


@dataclass(frozen=True, slots=True)
class Target:
    """Where to check, and how graphs are captured there."""

    device: torch.device
    make_backend: Callable[[], CaptureBackend]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one check."""

    passed: bool
    detail: str


Check = Callable[[Target], Outcome]


def golden_head(target: Target, dtype: torch.dtype = torch.float32) -> AcousticHead:
    """The embedded model's head on the target."""
    checkpoint = open_checkpoint(MODEL)
    weights = AcousticWeights.from_tensors(checkpoint.load(PREFIX, dtype, target.device), checkpoint.params)
    return AcousticHead.of(weights, checkpoint.params)


def check_golden_frames(target: Target) -> Outcome:
    """Golden frames come out exactly in float32, and within one level in bfloat16, whose roundings differ from device to device."""
    off = {}
    for name in ("b1", "b3_eoa", "b5", "bf16"):
        golden = load_file(GOLDEN / f"decode_frame_{name}.safetensors", str(target.device))
        head = golden_head(target, golden["hidden"].dtype)
        alpha = golden["cfg_alpha"].to(golden["hidden"].dtype)[:, None]
        end_allowed = torch.ones(len(alpha), dtype=torch.bool, device=target.device)
        codes = head.frames(golden["hidden"], alpha, golden["noise"], end_allowed).codes
        off[name] = int((codes - golden["codes"]).abs().max())
    passed = all(levels <= (1 if name == "bf16" else 0) for name, levels in off.items())
    return Outcome(passed, f"largest difference of a code: {off}")


def check_replays(target: Target) -> Outcome:
    """For every batch from 1 to 40 a replay equals an eager run of the same padded batch; all calls are replays."""
    head = golden_head(target)
    specs = input_specs(head)
    graphs = _captured(target, head.frames, specs)
    eager = in_blocks(head.frames, specs, BUCKETS)
    unequal, worst, replays = [], 0.0, 0
    for count in BATCHES:
        inputs = random_inputs(head, count)
        replayed, expected = graphs(*inputs), eager(*inputs)
        replays += len(split_rows(count, BUCKETS))
        worst = max(worst, _distance(replayed[1], expected[1]))
        if not torch.equal(replayed[0], expected[0]) or not bool(replayed[2].all()):
            unequal.append(count)
    counters = graphs.counters
    passed = not unequal and worst <= VELOCITY_TOLERANCE
    passed &= counters.eager_calls == 0 and counters.replays.total() == replays and graphs.captured == BUCKETS
    return Outcome(
        passed,
        f"unequal {unequal}, latents off by {worst:.1e}, replays {dict(counters.replays)}, captured {graphs.captured}",
    )


def check_velocities(target: Target) -> Outcome:
    """Replayed velocities are within 1e-5 of eager ones at every Euler step."""
    head = golden_head(target)
    specs = input_specs(head)

    def velocities(hidden: torch.Tensor, _alpha: torch.Tensor, noise: torch.Tensor, _end: torch.Tensor) -> Tensors:
        condition = head.flow.condition(hidden)
        steps = range(len(head.flow.schedule.dts))
        return (torch.cat([v for step in steps for v in head.flow.velocities(condition, step, noise)], dim=1),)

    graphs = _captured(target, velocities, specs)
    eager = in_blocks(velocities, specs, BUCKETS)
    inputs = [random_inputs(head, count) for count in BATCHES]
    worst = max(_distance(graphs(*rows)[0], eager(*rows)[0]) for rows in inputs)
    return Outcome(worst <= VELOCITY_TOLERANCE, f"velocities off by {worst:.1e}; at most {VELOCITY_TOLERANCE:.0e}")


def check_poisoned_padding(target: Target) -> Outcome:
    """NaN in all padding rows changes no bit of the real rows."""
    head = golden_head(target)
    specs = input_specs(head)
    poisoned = [RowSpec(spec.shape, spec.dtype, float("nan") if spec.dtype.is_floating_point else 1) for spec in specs]
    clean_graphs, poisoned_graphs = _captured(target, head.frames, specs), _captured(target, head.frames, poisoned)
    touched = []
    for count in BATCHES:
        inputs = random_inputs(head, count)
        pairs = zip(clean_graphs(*inputs), poisoned_graphs(*inputs), strict=True)
        if not all(torch.equal(clean, other) for clean, other in pairs):
            touched.append(count)
    return Outcome(not touched, f"batches that padding reached: {touched}")


def check_nested_capture(target: Target) -> Outcome:
    """Inside another capture the wrapper replays nothing, and that capture gives the eager result."""
    head = golden_head(target)
    graphs = _captured(target, head.frames, input_specs(head))
    inputs = random_inputs(head, 4)
    expected = head.frames(*inputs)
    outer = CudaCapture(target.device)
    outer.warm_up(lambda: graphs(*inputs))
    graphs.counters.replays.clear()
    replay, outputs = outer.capture(lambda: graphs(*inputs))
    replay()
    torch.cuda.synchronize(target.device)
    counters = graphs.counters
    passed = not counters.replays and counters.eager_calls == 1 and torch.equal(outputs[0], expected[0])
    return Outcome(passed, f"replays {dict(counters.replays)}, eager calls {counters.eager_calls}")


def check_thinker(target: Target) -> Outcome:
    """The thinker's hidden states of a golden utterance come out on the target."""
    golden = load_file(GOLDEN / "e2e_voice_a.safetensors")
    settings = StageSettings(
        kind="voxtral.thinker", addresses=("unix:none",), model=MODEL, device=str(target.device), batch_invariant=False
    )
    engine = create_thinker(settings)
    engine.load()
    params = stage_pb2.SpeechThinkerParams(text="hello the world, 42!", voice="tiny_a", max_frames=len(golden["codes"]))
    state = engine.admit(StageRequest("check", params)).state
    worst = 0.0
    inputs: Mapping[str, Rows] = {}
    for frame, codes in enumerate(golden["codes"]):
        result = engine.step([Work(state, frame, inputs)])
        while result.next[0] is Next.SILENT:
            result = engine.step([Work(state, frame, {})])
        worst = max(worst, _distance(to_torch(result.tensors["hidden"])[0], golden["hidden"][frame]))
        inputs = {"codes": from_torch(codes.int()[None])}
    return Outcome(worst <= GOLDEN_TOLERANCE, f"hidden states off by {worst:.1e}; at most {GOLDEN_TOLERANCE:.0e}")


def check_engine(target: Target) -> Outcome:
    """With batch_invariant rows get the same codes alone and among 20 others, and again after sleeping."""
    settings = StageSettings(kind="voxtral.acoustic", addresses=("unix:none",), model=MODEL, device=str(target.device))
    engine = create_acoustic(settings)
    engine.load()
    width = engine.describe().inputs[0].row_shape[0]
    hidden = torch.randn(21, width, generator=torch.Generator().manual_seed(0))
    works = []
    for row in range(len(hidden)):
        request = StageRequest(str(row), stage_pb2.SpeechAcousticParams(cfg_alpha=1.2, seed=row))
        works.append(Work(engine.admit(request).state, row, {"hidden": from_torch(hidden[row : row + 1])}))
    together = bytes(engine.step(works).tensors["codes"].data)
    alone = b"".join(engine.step([work]).tensors["codes"].data for work in works)
    engine.sleep(1)
    engine.wake()
    again = bytes(engine.step(works).tensors["codes"].data)
    return Outcome(together == alone == again, f"alone equal: {together == alone}, after sleep: {together == again}")


# Also run by the tests, on a CPU, so that they keep working.
PORTABLE: tuple[Check, ...] = (
    check_golden_frames,
    check_replays,
    check_velocities,
    check_poisoned_padding,
    check_engine,
    check_thinker,
)


def random_inputs(head: AcousticHead, count: int) -> Tensors:
    """Rows with mixed guidance; the first end is not allowed."""
    generator = torch.Generator().manual_seed(count)
    inputs = (
        torch.randn(count, head.params.acoustic.dim, generator=generator),
        torch.rand(count, 1, generator=generator) * 3,
        torch.randn(count, head.params.acoustic_codebooks, generator=generator),
    )
    device, dtype = head.weights.device, head.weights.dtype
    end_allowed = torch.arange(count, device=device) > 0
    return (*(tensor.to(device, dtype) for tensor in inputs), end_allowed)


def time_graphs(target: Target) -> dict[str, float]:
    """Milliseconds of a batch of frames at the released model's size in bfloat16, random weights: replayed and eager."""
    params = voxtral_4b.params()
    generator = torch.Generator(target.device).manual_seed(0)
    tensors = {
        name.removeprefix(PREFIX): torch.randn(shape, generator=generator, device=target.device, dtype=torch.bfloat16)
        * (shape[-1] ** -0.5 if len(shape) > 1 else 1.0)
        for name, shape in expected_tensors(params).items()
        if name.startswith(PREFIX)
    }
    head = AcousticHead.of(AcousticWeights.from_tensors(tensors, params), params)
    graphs = _captured(target, head.frames, input_specs(head))
    figures: dict[str, float] = {}
    for count in (1, 8, 32):
        inputs = random_inputs(head, count)
        for name, function in (("graph", graphs), ("eager", head.frames)):
            figures |= common.summary(f"b{count}_{name}", _times_s(target, function, inputs))
    return figures


def _run(check: Check, target: Target) -> Outcome:
    try:
        return check(target)
    except RuntimeError as error:  # what torch raises; the other checks still tell something
        return Outcome(passed=False, detail=f"raised {error}")


def _captured(target: Target, function: RowFunction, specs: Sequence[RowSpec]) -> BucketedGraphs:
    graphs = BucketedGraphs(function, specs, BUCKETS, target.make_backend())
    graphs.warm_up()
    return graphs


def _distance(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((left - right).abs().max())


def _times_s(target: Target, function: RowFunction, inputs: Tensors, repetitions: int = 50) -> list[float]:
    samples = []
    for _ in range(repetitions):
        torch.cuda.synchronize(target.device)
        begin = time.perf_counter()
        function(*inputs)
        torch.cuda.synchronize(target.device)
        samples.append(time.perf_counter() - begin)
    return samples[repetitions // 5 :]


@torch.inference_mode()
def main() -> int:
    """Run all checks and timings; gives the exit code."""
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing was checked")
        return NO_DEVICE
    device = torch.device("cuda", torch.cuda.current_device())
    target = Target(device, lambda: CudaCapture(device))
    outcomes = {check.__name__: _run(check, target) for check in (*PORTABLE, check_nested_capture)}
    for name, outcome in outcomes.items():
        print("PASS" if outcome.passed else "FAIL", f"{name}: {outcome.detail}")
    failed = sum(not outcome.passed for outcome in outcomes.values())
    print("device:", torch.cuda.get_device_name(device))
    figures = {"passed_count": float(len(outcomes) - failed), "failed_count": float(failed), **time_graphs(target)}
    ratios = {
        f"b{count}_graph_to_eager": figures[f"b{count}_graph_p50_ms"] / figures[f"b{count}_eager_p50_ms"]
        for count in (1, 8, 32)
    }
    common.report("gpu_checks", figures, ratios)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
