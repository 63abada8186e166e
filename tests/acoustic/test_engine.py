"""The engine of the acoustic stage: admission, frames from hidden states, faults of single rows, sleep, settings."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from google.protobuf.struct_pb2 import Struct
from safetensors.torch import load_file, save_file

from omnistage.stage.v1 import stage_pb2
from services.acoustic.engine import AcousticEngine, AcousticRequest, create_engine
from services.acoustic.model import AcousticHead
from stage_runtime.config import ConfigError, StageSettings
from stage_runtime.engine import Engine, Next, StageRequest, StepResult, Work
from stage_runtime.errors import CheckpointDamaged, InvalidRequest, NonFiniteOutput
from stage_runtime.noise import normals
from stage_runtime.tensors import DType, TensorSpec, check_tensors, rows_from_numpy
from stage_runtime.torch_tensors import from_torch

Golden = Callable[[str], dict[str, torch.Tensor]]
Events = Callable[[], list[dict[str, object]]]


@pytest.fixture
def make_engine(model: Path) -> Callable[..., AcousticEngine]:
    """A loaded engine of the embedded model; keyword arguments are settings of the stage."""

    def make(**settings: object) -> AcousticEngine:
        stage = StageSettings(kind="voxtral.acoustic", addresses=("unix:none",), **{"model": model, **settings})
        engine = create_engine(stage)
        engine.load()
        return engine

    return make


@pytest.fixture
def engine(make_engine: Callable[..., AcousticEngine]) -> AcousticEngine:
    """A loaded engine with the default settings."""
    return make_engine()


def admit(engine: Engine[AcousticRequest], **params: float) -> AcousticRequest:
    """The state of an admitted request."""
    message = stage_pb2.SpeechAcousticParams(**{"cfg_alpha": 1.2, **params})
    return engine.admit(StageRequest("r1", message)).state


def work(state: AcousticRequest, index: int, hidden: torch.Tensor) -> Work[AcousticRequest]:
    """A request's part of a step."""
    return Work(state, index, {"hidden": from_torch(hidden[None])})


def codes_of(result: StepResult) -> np.ndarray:
    """Codes of a result, a row each."""
    return result.tensors["codes"].numpy()


def state_step_count(model: Path, count: int) -> None:
    """Write n_decoding_steps into a model's params.json."""
    file = model / "params.json"
    params = json.loads(file.read_text())
    params["multimodal"]["audio_model_args"]["acoustic_transformer_args"]["n_decoding_steps"] = count
    file.chmod(0o644)
    file.write_text(json.dumps(params))


def hidden_rows(count: int) -> torch.Tensor:
    """Random hidden states of the embedded model."""
    return torch.randn(count, 48, generator=torch.Generator().manual_seed(3))


def test_description_tells_kind_capacity_and_tensors(make_engine: Callable[..., AcousticEngine]) -> None:
    """It takes a hidden state of the run dtype and gives seven codes; capacity is max_batch or max_sequences."""
    description = make_engine(engine={"max_batch": 8}).describe()
    larger = make_engine(dtype="bfloat16", engine={"max_batch": 8, "max_sequences": 100}).describe()

    assert (description.kind, description.model) == ("voxtral.acoustic", "voxtral-golden")
    assert description.inputs == (TensorSpec("hidden", DType.F32, (48,)),)
    assert description.outputs == (TensorSpec("codes", DType.I32, (7,)),)
    assert description.capacity == 8
    assert larger.capacity == 100
    assert larger.inputs == (TensorSpec("hidden", DType.BF16, (48,)),)
    assert larger.fingerprint == description.fingerprint


def test_admitted_requests_wait_for_input(engine: AcousticEngine) -> None:
    """Admission reserves nothing and asks for the first hidden state."""
    admission = engine.admit(StageRequest("r1", stage_pb2.SpeechAcousticParams(cfg_alpha=2.5, seed=9, min_frames=3)))

    assert admission.needs_input
    assert admission.first_index == 0
    assert admission.state == AcousticRequest(cfg_alpha=2.5, seed=9, min_frames=3)


@pytest.mark.parametrize("alpha", [float("nan"), float("inf"), float("-inf")])
def test_guidance_that_is_not_finite_is_refused(engine: AcousticEngine, alpha: float) -> None:
    """NaN and infinities are refused with the field, the value, and what would be right."""
    with pytest.raises(InvalidRequest, match="must be a finite number") as caught:
        admit(engine, cfg_alpha=alpha)

    assert [(v.field, v.reason) for v in caught.value.violations] == [("cfg_alpha", "NOT_FINITE")]


def test_foreign_params_and_tensors_are_refused(engine: AcousticEngine) -> None:
    """Params of another kind, or tensors in Submit, are the request's fault."""
    rows = rows_from_numpy(np.zeros((1, 7), np.int32))

    with pytest.raises(InvalidRequest, match="is Struct; must be SpeechAcousticParams"):
        engine.admit(StageRequest("r1", Struct()))
    with pytest.raises(InvalidRequest, match=r"has \['codes'\]"):
        engine.admit(StageRequest("r1", stage_pb2.SpeechAcousticParams(cfg_alpha=1), {"codes": rows}))


def test_frames_come_from_hidden_state_guidance_seed_and_index(engine: AcousticEngine, head: AcousticHead) -> None:
    """Codes equal those of the model with the noise of (seed, frame index); every request goes on waiting for input."""
    hidden = hidden_rows(4)
    states = [admit(engine, cfg_alpha=0.5 + row, seed=1000 + row) for row in range(4)]

    result = engine.step([work(state, 7 * row, hidden[row]) for row, state in enumerate(states)])

    noise = torch.from_numpy(normals([1000, 1001, 1002, 1003], [0, 7, 14, 21], 6))
    alpha = torch.tensor([[0.5], [1.5], [2.5], [3.5]])
    expected = head.frames(hidden, alpha, noise, torch.ones(4, dtype=torch.bool))
    assert (codes_of(result) == expected.codes.numpy()).all()
    assert list(result.next) == [Next.WAIT] * 4
    assert not result.errors
    check_tensors(result.tensors, engine.describe().outputs)


def test_noise_depends_on_seed_and_frame(engine: AcousticEngine) -> None:
    """The same hidden state gives other acoustic codes with another seed or frame index, and the same ones again with the same."""
    hidden = hidden_rows(1)[0]
    one, other = admit(engine, seed=1), admit(engine, seed=2)

    codes = codes_of(engine.step([work(s, i, hidden) for s, i in ((one, 0), (other, 0), (one, 1), (one, 0))]))

    assert (codes[0] == codes[3]).all()
    assert len({row.tobytes() for row in codes}) == 3
    assert len(set(codes[:, 0])) == 1  # the semantic code takes no noise


def test_end_frames_have_no_sound_and_may_be_forbidden(engine: AcousticEngine, golden: Golden) -> None:
    """A state that ends gives [1, 2, ..., 2], unless its index is below min_frames; then it gives another code."""
    hidden = golden("decode_frame_b3_eoa")["hidden"][1]
    free, bound = admit(engine), admit(engine, min_frames=5)

    codes = codes_of(engine.step([work(free, 0, hidden), work(bound, 4, hidden), work(bound, 5, hidden)]))

    assert codes[0].tolist() == codes[2].tolist() == [1, 2, 2, 2, 2, 2, 2]
    assert codes[1, 0] > 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_faulty_hidden_state_fails_its_own_request_alone(engine: AcousticEngine, bad: float) -> None:
    """One NaN or infinity fails that row, naming tensor and frame; the others get exactly the codes they get without it."""
    hidden = hidden_rows(3)
    poisoned = hidden.clone()
    poisoned[1, 17] = bad
    states = [admit(engine, seed=row) for row in range(3)]

    result = engine.step([work(state, 6, poisoned[row]) for row, state in enumerate(states)])

    alone = [codes_of(engine.step([work(states[row], 6, hidden[row])]))[0] for row in (0, 2)]
    assert list(result.next) == [Next.WAIT, Next.FAILED, Next.WAIT]
    assert (codes_of(result) == np.stack(alone)).all()
    assert isinstance(result.errors[1], NonFiniteOutput)
    assert result.errors[1].metadata == {"tensor": "hidden", "step": "6"}


def test_overflow_inside_the_model_fails_that_request_alone(engine: AcousticEngine) -> None:
    """A finite hidden state, or guidance, whose velocities overflow fails that row; the others get their codes."""
    hidden = hidden_rows(3)
    huge = hidden.clone()
    huge[0] = 3e38
    states = [admit(engine, seed=0), admit(engine, seed=1), admit(engine, seed=2, cfg_alpha=3e38)]

    result = engine.step([work(state, 2, huge[row]) for row, state in enumerate(states)])

    assert list(result.next) == [Next.FAILED, Next.WAIT, Next.FAILED]
    assert {place: error.metadata["tensor"] for place, error in result.errors.items()} == {0: "velocity", 2: "velocity"}
    assert (codes_of(result) == codes_of(engine.step([work(states[1], 2, hidden[1])]))).all()


def test_a_step_of_failed_rows_alone_gives_an_empty_tensor(engine: AcousticEngine) -> None:
    """When no row is good the codes have no row, and their shape is still right."""
    result = engine.step([work(admit(engine), 0, torch.full((48,), float("nan")))])

    assert list(result.next) == [Next.FAILED]
    assert codes_of(result).shape == (0, 7)


@pytest.mark.parametrize("invariant", [True, False], ids=["batch invariant", "free"])
def test_more_requests_than_max_batch_share_a_step(
    make_engine: Callable[..., AcousticEngine], head: AcousticHead, *, invariant: bool
) -> None:
    """With max_sequences above max_batch a step takes them all, in parts, with the codes of the model."""
    engine = make_engine(engine={"max_batch": 4, "max_sequences": 50}, batch_invariant=invariant)
    hidden = hidden_rows(19)

    result = engine.step([work(admit(engine, seed=row), 1, hidden[row]) for row in range(19)])

    noise = torch.from_numpy(normals(range(19), [1] * 19, 6))
    expected = head.frames(hidden, torch.full((19, 1), 1.2), noise, torch.ones(19, dtype=torch.bool))
    assert (codes_of(result) == expected.codes.numpy()).all()


def test_bfloat16_runs_take_bfloat16_rows(make_engine: Callable[..., AcousticEngine]) -> None:
    """Hidden states of the run dtype are taken as they are; noise is float32, then rounded."""
    engine = make_engine(dtype="bfloat16")
    hidden = hidden_rows(2).bfloat16()

    result = engine.step([work(admit(engine, seed=row), 0, hidden[row]) for row in range(2)])

    assert list(result.next) == [Next.WAIT] * 2
    assert codes_of(result).min() >= 1


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_wake_change_no_code(engine: AcousticEngine, level: int) -> None:
    """After sleeping at either level the same rows give the same codes."""
    works = [work(admit(engine, seed=5), 3, hidden_rows(1)[0])]
    before = codes_of(engine.step(works))

    engine.sleep(level)
    engine.wake()

    assert (codes_of(engine.step(works)) == before).all()


def test_waking_on_other_weights_is_refused(
    make_engine: Callable[..., AcousticEngine], model: Path, tmp_path: Path
) -> None:
    """A checkpoint that was exchanged while the stage slept is not loaded silently."""
    copy = shutil.copytree(model, tmp_path / "model")
    engine = make_engine(model=copy)
    engine.sleep(2)
    state_step_count(copy, 3)

    with pytest.raises(CheckpointDamaged, match="changed while the stage slept"):
        engine.wake()


def test_missing_step_count_is_the_only_warning_at_start(
    make_engine: Callable[..., AcousticEngine], events: Events
) -> None:
    """Loading warns once that n_decoding_steps is absent, with the number used, and of nothing else: no graphs are tried on a CPU."""
    make_engine()

    warnings = [log for log in events() if log["level"] == "warning"]
    assert [(log["event"], log["used"]) for log in warnings] == [("decoding_steps_default", 7)]


def test_stated_step_count_is_used_without_a_warning(
    make_engine: Callable[..., AcousticEngine], model: Path, tmp_path: Path, events: Events
) -> None:
    """With n_decoding_steps in params.json loading warns of nothing, and that number is in use."""
    copy = shutil.copytree(model, tmp_path / "model")
    state_step_count(copy, 4)

    engine = make_engine(model=copy)

    assert [log for log in events() if log["level"] == "warning"] == []
    assert len(engine._loaded_decoder().head.flow.schedule.dts) == 4


def test_unknown_acoustic_tensors_are_skipped_with_a_warning(
    make_engine: Callable[..., AcousticEngine], model: Path, tmp_path: Path, events: Events
) -> None:
    """A tensor under our prefix that no model has is named in a warning; a stored inv_freq is not worth one."""
    copy = shutil.copytree(model, tmp_path / "model")
    weights = copy / "consolidated.safetensors"
    tensors = load_file(weights)
    tensors |= {f"acoustic_transformer.{name}": torch.ones(2) for name in ("extra.weight", "time_embedding.inv_freq")}
    weights.chmod(0o644)
    save_file(tensors, weights)

    make_engine(model=copy)

    (log,) = [log for log in events() if log["event"] == "acoustic_tensors_skipped"]
    assert (log["level"], log["count"], log["first"]) == ("warning", 1, "acoustic_transformer.extra.weight")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"max_batch": 0}, "max_batch: .*greater than or equal to 1"),
        ({"max_sequences": 31}, r"max_sequences \(31\) must not be below max_batch \(32\)"),
        ({"invariant_rows": 64}, r"invariant_rows \(64\) must not exceed max_batch \(32\)"),
        ({"graph_buckets": []}, "graph_buckets: .*at least 1 item"),
        ({"graph_buckets": [0, 4]}, r"graph_buckets.0: .*greater than or equal to 1"),
        ({"graph_buckets": [4, 4]}, "every bucket must be named once"),
        ({"max_bach": 4}, "max_bach: unknown key"),
    ],
)
def test_faulty_settings_are_refused(model: Path, settings: dict[str, object], text: str) -> None:
    """Each faulty engine setting is an error that names it, its value and its limit."""
    stage = StageSettings(kind="voxtral.acoustic", addresses=("unix:none",), model=model, engine=settings)

    with pytest.raises(ConfigError, match=text):
        create_engine(stage)


def test_a_missing_model_is_damage(tmp_path: Path) -> None:
    """Loading from a directory that does not exist names it."""
    stage = StageSettings(kind="voxtral.acoustic", addresses=("unix:none",), model=tmp_path / "nowhere")

    with pytest.raises(CheckpointDamaged, match="nowhere"):
        create_engine(stage).load()
