"""CPU cost of the acoustic head at the released model's size, against the same formulas written down plainly.

Random weights of the real shapes, one thread, CPU time of the process. Both sides get the same weights and inputs and take turns; the
best of a few repetitions counts. What does not fit the time budget is left out and named. Also times whole engine steps on the
embedded golden model.

    python -m benchmarks.acoustic [--budget-s 220]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks import common, plain_acoustic, voxtral_4b
from omnistage.stage.v1 import stage_pb2
from services.acoustic.engine import create_engine
from services.acoustic.model import AcousticHead, AcousticWeights
from services.acoustic.model.weights import PREFIX
from services.voxtral.params import VoxtralParams, expected_tensors
from stage_runtime.config import StageSettings
from stage_runtime.engine import StageRequest, Work
from stage_runtime.torch_tensors import from_torch

Tensors = dict[str, torch.Tensor]

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
STEP_ROWS = (1, 8, 32)
STEP_REPETITIONS = 40
GOLDEN = Path(__file__).resolve().parents[1] / "models" / "embedded" / "voxtral-golden"


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison."""

    dtype: str
    rows: int
    repetitions: int

    @property
    def name(self) -> str:
        """How figures of it begin."""
        return f"{self.dtype}_b{self.rows}"


# In the order of their importance: later ones are left out when time is short.
CASES = (
    Case("f32", 8, 3),
    Case("f32", 1, 2),
    Case("f32", 32, 1),
    Case("bf16", 1, 1),
    Case("bf16", 8, 1),
    Case("bf16", 32, 1),
)


@dataclass(slots=True)
class Results:
    """What was measured so far, and when to stop.

    `wall_s` holds rows and wall time of the last measurement of each side and dtype, to foretell the next.
    """

    deadline: float
    figures: dict[str, float] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    wall_s: dict[tuple[str, str], tuple[int, float]] = field(default_factory=dict)


def main() -> None:
    """Measure and report; exits with an error if float32 codes differ from the plain ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--budget-s", type=float, default=220.0, help="wall time after which no long measurement starts"
    )
    results = Results(deadline=time.monotonic() + parser.parse_args().budget_s)
    torch.set_num_threads(1)
    with torch.inference_mode():
        _golden_steps(results)
        params = voxtral_4b.params()
        tensors = _random_tensors(params)
        for name, dtype in DTYPES.items():
            tensors = {key: value.to(dtype) for key, value in tensors.items()}
            head = AcousticHead.of(AcousticWeights.from_tensors(tensors, params), params)
            for case in CASES:
                if case.dtype == name:
                    _compare(results, case, head, tensors)
    if results.left_out:
        print("left out, for lack of time:", ", ".join(results.left_out))
    results.figures["left_out_count"] = len(results.left_out)
    common.report("acoustic", results.figures, results.ratios)


def _golden_steps(results: Results) -> None:
    """Median wall time of engine steps on the embedded model, noise and packing included."""
    settings = StageSettings(kind="voxtral.acoustic", addresses=("unix:none",), model=GOLDEN)
    engine = create_engine(settings)
    engine.load()
    width = engine.describe().inputs[0].row_shape[0]
    for rows in STEP_ROWS:
        works = []
        for row in range(rows):
            request = StageRequest(str(row), stage_pb2.SpeechAcousticParams(cfg_alpha=1.2, seed=row))
            hidden = from_torch(torch.randn(1, width, generator=torch.Generator().manual_seed(row)))
            works.append(Work(engine.admit(request).state, 0, {"hidden": hidden}))
        samples = []
        for _ in range(STEP_REPETITIONS):
            begin = time.perf_counter()
            engine.step(works)
            samples.append(time.perf_counter() - begin)
        results.figures[f"golden_b{rows}_step_p50_ms"] = common.percentile(samples, 50) * 1e3


def _random_tensors(params: VoxtralParams) -> Tensors:
    """Matrices that keep the variance of their input, norms of ones."""
    generator = torch.Generator().manual_seed(0)
    tensors: Tensors = {}
    for name, shape in expected_tensors(params).items():
        if name.startswith(PREFIX):
            empty = torch.empty(shape)
            filled = empty.fill_(1) if len(shape) == 1 else empty.normal_(0, shape[1] ** -0.5, generator=generator)
            tensors[name.removeprefix(PREFIX)] = filled
    return tensors


def _compare(results: Results, case: Case, head: AcousticHead, tensors: Tensors) -> None:
    generator = torch.Generator().manual_seed(case.rows)
    params, dtype = head.params, DTYPES[case.dtype]
    hidden = torch.randn(case.rows, params.acoustic.dim, generator=generator).to(dtype)
    alpha = torch.linspace(1, 3, case.rows)[:, None].to(dtype)
    noise = torch.randn(case.rows, params.acoustic_codebooks, generator=generator).to(dtype)
    sides: dict[str, Callable[[], torch.Tensor]] = {
        "served": lambda: head.frames(hidden, alpha, noise, torch.ones(case.rows, dtype=torch.bool)).codes,
        "plain": lambda: plain_acoustic.frames(tensors, params, hidden, alpha, noise),
    }
    cpu_s: dict[str, float] = {}
    codes: dict[str, torch.Tensor] = {}
    for _ in range(case.repetitions):
        for side, compute in sides.items():
            if not _fits(results, case, side):
                results.left_out.append(f"{case.name}_{side}")
                continue
            begin, cpu_begin = time.monotonic(), time.process_time()
            codes[side] = compute()
            spent = time.process_time() - cpu_begin
            results.wall_s[side, case.dtype] = (case.rows, time.monotonic() - begin)
            cpu_s[side] = min(spent, cpu_s.get(side, spent))
    _record(results, case, cpu_s, codes)


def _fits(results: Results, case: Case, side: str) -> bool:
    """Whether a measurement will probably end in time: it takes at most as much longer as it has more rows."""
    last_rows, last_s = results.wall_s.get((side, case.dtype), (case.rows, 0.0))
    return time.monotonic() + last_s * max(1, case.rows / last_rows) < results.deadline


def _record(results: Results, case: Case, cpu_s: dict[str, float], codes: dict[str, torch.Tensor]) -> None:
    for side, spent in cpu_s.items():
        results.figures[f"{case.name}_{side}_step_cpu_s"] = spent
        results.figures[f"{case.name}_{side}_cpu_s_per_frame"] = spent / case.rows
    if cpu_s.keys() != {"served", "plain"}:
        return
    results.ratios[case.name] = cpu_s["served"] / cpu_s["plain"]
    equal = float((codes["served"] == codes["plain"]).float().mean())
    results.figures[f"{case.name}_equal_codes_fraction"] = equal
    if case.dtype == "f32" and equal < 1:
        raise SystemExit(f"{case.name}: only {equal:.4%} of the codes equal the plain ones; nothing reported")


if __name__ == "__main__":
    main()
