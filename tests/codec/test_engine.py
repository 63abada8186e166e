"""The codec engine by its contract: what it tells, admits and refuses, what a step gives, faults of one request, sleep."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from google.protobuf import struct_pb2

from omnistage.stage.v1 import stage_pb2
from services.codec.engine import create_engine
from stage_runtime.config import ConfigError, StageSettings
from stage_runtime.engine import Next, StageRequest, Work
from stage_runtime.errors import CheckpointDamaged, InvalidRequest, NonFiniteOutput, StageProtocolError
from stage_runtime.scheduler import Accepted, Failed, Finished, InputRow, Key, Output, Scheduler, Submission
from stage_runtime.tensors import DType, Rows, TensorSpec, check_tensors, rows_from_numpy

END_FRAME = torch.tensor([[1, 2, 2, 2, 2, 2, 2]])


def params(first: int = 5, chunk: int = 25, context: int = 25) -> stage_pb2.SpeechCodecParams:
    """A chunk plan as it comes with Submit."""
    return stage_pb2.SpeechCodecParams(first_chunk_frames=first, chunk_frames=chunk, context_frames=context)


def rows(codes: torch.Tensor) -> Rows:
    """Codes as they come over the wire."""
    return rows_from_numpy(codes.to(torch.int32).numpy(), row_counts=[len(codes)])


def test_description_tells_tensors_and_facts(make_engine) -> None:
    """What a router needs to know, from the checkpoint and the settings."""
    engine = make_engine(engine={"max_sequences": 7, "max_window_frames": 120})

    told = engine.describe()

    assert (told.kind, told.model, told.capacity) == ("voxtral.codec", "voxtral-golden", 7)
    assert told.inputs == (TensorSpec("codes", DType.I32, (7,), ragged=True),)
    assert told.outputs == (TensorSpec("pcm", DType.F32, (), ragged=True),)
    assert told.facts == stage_pb2.SpeechCodecFacts(
        sample_rate_hz=24_000, samples_per_frame=1920, left_reach_frames=21, max_window_frames=120, codebook_count=7
    )
    assert stage_pb2.DescribeStageResponse(speech_codec=told.facts).WhichOneof("facts") == "speech_codec"


def test_fingerprint_tells_the_run_dtype(make_engine) -> None:
    """Replicas that compute in another dtype make other samples, so they must not pass for one another."""
    exact, again, rounded = (make_engine(dtype=dtype) for dtype in ("float32", "float32", "bfloat16"))

    assert exact.describe().fingerprint == again.describe().fingerprint != rounded.describe().fingerprint


@pytest.mark.parametrize("plan", [(1, 1, 0), (5, 25, 25), (375, 375, 25)])
def test_plans_that_fit_are_admitted(make_engine, plan: tuple[int, int, int]) -> None:
    """Up to windows of max_window_frames, 400 by default; a request waits for its first window."""
    engine = make_engine()

    admission = engine.admit(StageRequest("x", params(*plan)))

    assert admission.needs_input
    assert admission.first_index == 0
    engine.release(admission.state)


@pytest.mark.parametrize(
    ("plan", "faults"),
    [
        ((0, 25, 25), {"first_chunk_frames": "is 0; must be 1 to chunk_frames, which is 25"}),
        ((26, 25, 25), {"first_chunk_frames": "is 26; must be 1 to chunk_frames, which is 25"}),
        ((0, 0, 0), {"first_chunk_frames": "is 0; must be 1 to chunk_frames, which is 0"}),
        ((5, 376, 25), {"chunk_frames": "makes windows of 401 frames with context_frames 25; must be at most 400"}),
        ((9, 8, 2**32 - 1), {"first_chunk_frames": "is 9", "chunk_frames": "makes windows of 4294967303 frames"}),
    ],
)
def test_plans_that_do_not_fit_are_refused(make_engine, plan: tuple[int, int, int], faults: dict[str, str]) -> None:
    """Every fault at once, with the value and the limit."""
    with pytest.raises(InvalidRequest) as caught:
        make_engine().admit(StageRequest("x", params(*plan)))

    assert {violation.field for violation in caught.value.violations} == set(faults)
    for violation in caught.value.violations:
        assert violation.description.startswith(faults[violation.field])
        assert violation.reason == "OUT_OF_RANGE"


def test_requests_for_another_stage_are_refused(make_engine) -> None:
    """Other params, or tensors that a codec has no use for."""
    engine = make_engine()

    for message in (stage_pb2.SpeechAcousticParams(), struct_pb2.Struct()):
        with pytest.raises(InvalidRequest, match="must be SpeechCodecParams"):
            engine.admit(StageRequest("x", message))
    with pytest.raises(InvalidRequest, match=r"tensors: has \['codes'\]; this stage takes none here"):
        engine.admit(StageRequest("x", params(), {"codes": rows(END_FRAME)}))


def test_windows_of_a_step_are_packed_in_order(driver, random_codes) -> None:
    """Exactly new * 1920 samples for each work, in the order of the works, as the output spec says."""
    codes = random_codes(60)
    streams = [driver.open() for _ in range(4)]
    windows = [(codes[:5], 0), (codes[:30], 25), (codes[:1], 0), (codes[5:40], 10)]

    result = driver.step(*((stream, *window) for stream, window in zip(streams, windows, strict=True)))

    check_tensors(result.tensors, driver.engine.describe().outputs)
    assert result.tensors["pcm"].row_counts == tuple(new * 1920 for new in (5, 5, 1, 25))
    for stream, window in zip(streams, windows, strict=True):
        assert torch.equal(stream.pcm, driver.decode(*window))


@pytest.mark.parametrize(
    ("end", "context", "frames"),
    [(9, 5, 4), (5, 5, 0), (3, 5, 0), (0, 0, 0), (0, 5, 0), (9, 0, 9)],
    ids=["among_new", "first_new", "in_context", "very_first", "first_of_context", "last"],
)
@pytest.mark.parametrize("batch_invariant", [True, False])
def test_no_samples_from_the_end_of_audio_on(
    make_driver, random_codes, end: int, context: int, frames: int, *, batch_invariant: bool
) -> None:
    """Where the END_AUDIO frame stands among context and new frames decides how many frames give samples; others are untouched."""
    driver = make_driver(batch_invariant=batch_invariant)
    codes = random_codes(10)
    ended = codes.clone()
    ended[end] = END_FRAME
    ended[end + 1 :] = 77  # never looked at
    first, second = driver.open(), driver.open()

    result = driver.step((first, ended, context), (second, codes, 0))

    assert result.next == [Next.WAIT, Next.WAIT]
    assert len(first.pcm) == frames * 1920
    assert len(second.pcm) == 10 * 1920
    if frames:
        torch.testing.assert_close(first.pcm, driver.decode(codes[:end], context), atol=1e-5, rtol=1e-5)


def test_a_step_without_any_sample_still_answers(driver) -> None:
    """Zero rows for the request, which goes on waiting."""
    stream = driver.open()

    result = driver.step((stream, END_FRAME, 0))

    assert result.next == [Next.WAIT]
    assert result.tensors["pcm"] == Rows(DType.F32, (), b"", (0,))


def _bad_code(codes: torch.Tensor) -> tuple[Rows, int]:
    codes[4, 2] = 23
    return rows(codes), 0


FAULTS = {
    "code": (_bad_code, "frame 4 has code 23 in codebook 2; real codes there are 2 to 22"),
    "codebooks": (lambda codes: (rows(codes[:, :6]), 0), r"codes are I32 \[6\] a frame; this codec takes I32 \[7\]"),
    "dtype": (
        lambda codes: (rows_from_numpy(codes.numpy(), row_counts=[10]), 0),
        r"codes are I64 \[7\] a frame; this codec takes I32 \[7\]",
    ),
    "all_context": (
        lambda codes: (rows(codes), 10),
        "a window of 10 frames says that 10 are context; at least one must",
    ),
    "beyond_context": (
        lambda codes: (rows(codes), 2**32 - 1),
        "a window of 10 frames says that 4294967295 are context",
    ),
    "no_frame": (lambda codes: (rows(codes[:0]), 0), "a window of 0 frames says that 0 are context; at least one must"),
    "long_chunk": (
        lambda codes: (rows(codes.repeat(3, 1)), 4),
        "26 new frames after 4 of context; announced were at most 25 after 25",
    ),
    "long_context": (
        lambda codes: (rows(codes.repeat(3, 1)), 26),
        "4 new frames after 26 of context; announced were at most 25 after 25",
    ),
}


@pytest.mark.parametrize("batch_invariant", [True, False])
@pytest.mark.parametrize(("fault", "text"), FAULTS.values(), ids=FAULTS)
def test_a_faulty_window_fails_its_own_request_alone(
    make_driver, random_codes, fault, text: str, *, batch_invariant: bool
) -> None:
    """The others of the step get their samples, as if the faulty one had not been there."""
    driver = make_driver(batch_invariant=batch_invariant)
    engine = driver.engine
    codes = random_codes(10)
    states = [engine.admit(StageRequest("x", params())).state for _ in range(3)]
    bad, context = fault(codes.clone())
    good = Work(states[0], 0, {"codes": rows(codes)}, 5)
    works = [good, Work(states[1], 0, {"codes": bad}, context), Work(states[2], 0, {"codes": rows(codes)}, 9)]

    result = engine.step(works)

    assert result.next == [Next.WAIT, Next.FAILED, Next.WAIT]
    with pytest.raises(StageProtocolError, match=text):
        raise result.errors[1]
    assert result.tensors["pcm"].row_counts == (5 * 1920, 1920)
    alone = engine.step([good]).tensors["pcm"].numpy()
    np.testing.assert_allclose(result.tensors["pcm"].numpy()[: 5 * 1920], alone, atol=1e-5)


def test_a_step_of_faulty_windows_only(make_engine, random_codes) -> None:
    """No output, an error for each."""
    engine = make_engine()
    state = engine.admit(StageRequest("x", params())).state

    result = engine.step([Work(state, 0, {"codes": rows(random_codes(3))}, 3)] * 2)

    assert result.next == [Next.FAILED, Next.FAILED]
    assert sorted(result.errors) == [0, 1]
    assert result.tensors["pcm"] == Rows(DType.F32, (), b"", ())


def test_requests_share_steps_unless_batch_invariant(make_engine) -> None:
    """With batch_invariant each has steps of its own: the first would else wait for the last without gain."""
    for batch_invariant, keys in ((True, 2), (False, 1)):
        engine = make_engine(batch_invariant=batch_invariant)
        states = [engine.admit(StageRequest("x", params())).state for _ in range(2)]
        assert len({engine.batch_key(state) for state in states}) == keys


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_served_by_the_scheduler(make_engine, decoder, random_codes, *, batch_invariant: bool) -> None:
    """Three requests on a real scheduler: two streams give the whole decode, the one with a bad code fails with the engine's error."""
    events: list[object] = []
    scheduler = Scheduler(make_engine(batch_invariant=batch_invariant), max_queued=4, emit=events.append)
    codes = {Key(1, number): random_codes(12, seed=number) for number in range(3)}
    codes[Key(1, 2)][7, 0] = 0
    for key in codes:
        scheduler.submit(Submission(key, StageRequest(f"r{key.id}", params(5, 5, 25))))
    for index, (end, context) in enumerate([(5, 0), (10, 5), (12, 10)]):
        for key, frames in codes.items():
            scheduler.give(key, InputRow(index, {"codes": rows(frames[:end])}, context))
            if index == 2:
                scheduler.end(key)
        while scheduler.tick():
            scheduler.step()

    pcm = dict.fromkeys(codes, b"")
    for event in events:
        if isinstance(event, Output):
            for key, part in zip(event.keys, event.tensors["pcm"].split(), strict=True):
                pcm[key] += bytes(part.data)
    assert sum(isinstance(event, Accepted) for event in events) == 3
    assert {event.key.id for event in events if isinstance(event, Finished)} == {0, 1}
    (failed,) = (event for event in events if isinstance(event, Failed))
    assert failed.key.id == 2
    assert "frame 7 has code 0 in codebook 0; real codes there are 2 to 95" in str(failed.error)
    for key in (Key(1, 0), Key(1, 1)):
        wave = torch.frombuffer(bytearray(pcm[key]), dtype=torch.float32)
        torch.testing.assert_close(wave, decoder(codes[key][None])[0], atol=1e-5, rtol=1e-5)
    assert len(pcm[Key(1, 2)]) == 5 * 1920 * 4


def test_samples_that_are_not_finite_fail_in_the_scheduler(make_engine, random_codes) -> None:
    """A damaged weight makes NaN: the request fails with NON_FINITE_OUTPUT, it gets no samples."""
    engine = make_engine()
    with torch.inference_mode():
        engine._decoder.weights.semantic_table[5] = float("nan")
    events: list[object] = []
    scheduler = Scheduler(engine, max_queued=4, emit=events.append)
    codes = random_codes(5)
    codes[3, 0] = 7
    scheduler.submit(Submission(Key(1, 1), StageRequest("r", params())))
    scheduler.give(Key(1, 1), InputRow(0, {"codes": rows(codes)}))
    scheduler.tick()
    scheduler.step()

    assert [type(event) for event in events] == [Accepted, Failed]
    assert isinstance(events[1].error, NonFiniteOutput)


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_wake(driver, random_codes, level: int) -> None:
    """Samples after waking are those before, to the bit; level 2 frees the weights."""
    codes = random_codes(10)
    before, told = driver.decode(codes), driver.engine.describe()

    driver.engine.sleep(level)
    assert (driver.engine._decoder is None) == (level == 2)
    driver.engine.wake()

    assert torch.equal(driver.decode(codes), before)
    assert driver.engine.describe() == told


def test_waking_with_another_checkpoint_is_refused(make_engine, model: Path, tmp_path: Path) -> None:
    """A checkpoint that was replaced while the stage slept would change voices in the middle of the day."""
    copied = tmp_path / "model"
    shutil.copytree(model, copied)
    engine = make_engine(model=copied)
    engine.sleep(2)
    file = copied / "params.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"trained_further": True}))

    with pytest.raises(CheckpointDamaged, match="changed while the stage slept; restart the stage"):
        engine.wake()


def test_a_step_that_raises_leaves_the_engine_usable(driver, random_codes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory in the middle of a step: after `recover` the same step gives its samples."""
    codes = random_codes(10)
    before = driver.decode(codes)
    stream = driver.open()

    with monkeypatch.context() as patch:
        patch.setattr("services.codec.engine.decode_windows", _out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            driver.step((stream, codes, 0))
    driver.engine.recover()

    driver.step((stream, codes, 0))
    assert torch.equal(stream.pcm, before)


def _out_of_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("engine", "text"),
    [
        ({"max_batch": 0}, r"max_batch: Input should be greater than or equal to 1 \(got 0\)"),
        ({"max_window_frames": "many"}, r"max_window_frames: .* \(got 'many'\)"),
        ({"window": 5}, "window: unknown key"),
    ],
)
def test_faulty_settings_are_told(model: Path, engine: dict[str, object], text: str) -> None:
    """With their place and value, before anything is loaded."""
    with pytest.raises(ConfigError, match=f"engine settings of voxtral.codec: {text}"):
        create_engine(StageSettings(kind="voxtral.codec", addresses=("unix:none",), model=model, engine=engine))


def test_a_missing_checkpoint_is_told(tmp_path: Path) -> None:
    """By the path that was looked at."""
    settings = StageSettings(kind="voxtral.codec", addresses=("unix:none",), model=tmp_path / "none")

    with pytest.raises(CheckpointDamaged, match="none: is not a directory"):
        create_engine(settings).load()


def test_windows_shorter_than_the_warm_up_can_be_set(make_driver, random_codes) -> None:
    """A limit below the warm-up's lengths loads, and serves windows up to it."""
    driver = make_driver(engine={"max_window_frames": 4})
    stream = driver.open(first=1, chunk=2, context=2)

    driver.step((stream, random_codes(4), 2))

    assert len(stream.pcm) == 2 * 1920
