"""stage_runtime.interceptors and stage_runtime.trailers: what clients see of the errors of handlers, over a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import time

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from stage_runtime import errors, logs, trailers
from stage_runtime.errors import (
    FieldViolation,
    InternalError,
    InvalidRequest,
    QueueFull,
    RemoteError,
    StageReplicaLost,
    UnknownVoice,
)
from stage_runtime.interceptors import ErrorInterceptor

KINDS = {
    "unary_unary": grpc.unary_unary_rpc_method_handler,
    "unary_stream": grpc.unary_stream_rpc_method_handler,
    "stream_unary": grpc.stream_unary_rpc_method_handler,
    "stream_stream": grpc.stream_stream_rpc_method_handler,
}
SECRET = "a prompt that nobody may see"


@contextlib.asynccontextmanager
async def channel_to(handler, kind="unary_unary", options=()):
    """A channel to a server with one method, /test.Test/Do."""
    server = grpc.aio.server(interceptors=[ErrorInterceptor()])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Test", {"Do": KINDS[kind](handler)}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
            yield channel
    finally:
        await server.stop(None)


async def outcome(channel, kind="unary_unary", timeout=10):
    """The messages that arrived, and the error with which the call ended."""
    method = getattr(channel, kind)("/test.Test/Do")
    call = method(iter([b""]) if kind.startswith("stream") else b"", timeout=timeout)
    messages = []
    try:
        if kind.endswith("stream"):
            async for message in call:
                messages.append(message)  # noqa: PERF401 - those before an error count
        else:
            messages.append(await call)
    except grpc.aio.AioRpcError as error:
        return messages, error
    return messages, None


async def failure(handler, kind="unary_unary", **arguments):
    """The error of a call to `handler`, as our client raises it, and the raw one."""
    async with channel_to(handler, kind, **arguments) as channel:
        _, raw = await outcome(channel, kind)
    return errors.from_status(rpc_status.from_call(raw)), raw


@pytest.mark.parametrize("kind", KINDS)
async def test_an_error_of_ours_arrives_whole_from_every_kind_of_handler(kind: str) -> None:
    """Class, message, metadata and retry delay survive the way."""
    sent = StageReplicaLost("codec", "127.0.0.1:9", "killed", retry_after_s=2.5)

    async def fail(request, context):
        raise sent

    received, raw = await failure(fail, kind)

    assert raw.code() is grpc.StatusCode.UNAVAILABLE
    assert type(received) is StageReplicaLost
    assert (received.message, received.metadata, received.retry_after_s) == (sent.message, sent.metadata, 2.5)


@pytest.mark.parametrize("kind", ["unary_stream", "stream_stream"])
@pytest.mark.parametrize("style", ["generator", "writer"])
async def test_an_error_in_the_middle_of_a_stream_comes_after_its_messages(kind: str, style: str) -> None:
    """The client gets what was sent before, then the status."""

    async def generate(request, context):
        yield b"one"
        yield b"two"
        raise UnknownVoice("x", ["a"])

    async def write(request, context):
        await context.write(b"one")
        await context.write(b"two")
        raise UnknownVoice("x", ["a"])

    async with channel_to(generate if style == "generator" else write, kind) as channel:
        messages, raw = await outcome(channel, kind)

    assert messages == [b"one", b"two"]
    assert type(errors.from_status(rpc_status.from_call(raw))) is UnknownVoice


@pytest.mark.parametrize("kind", KINDS)
async def test_results_pass_unchanged(kind: str) -> None:
    """Handlers of all kinds work as without the interceptor; requests arrive."""

    async def unary(request, context):
        return b"ok"

    async def generate(request, context):
        if kind == "stream_stream":
            assert [each async for each in request] == [b""]
        yield b"ok"

    async with channel_to(generate if kind.endswith("stream") else unary, kind) as channel:
        assert await outcome(channel, kind) == ([b"ok"], None)


async def test_a_bug_tells_the_client_its_request_id_and_nothing_else(log) -> None:
    """INTERNAL with the id; the traceback, but no local variable, is in the log under that id."""

    async def fail(request, context):
        logs.request_id.set("r-17")
        prompt = SECRET
        return {}[len(prompt)]

    received, raw = await failure(fail)

    assert type(received) is InternalError
    assert received.request_id == "r-17"
    assert "KeyError" not in str(raw)
    text = log.getvalue()
    assert "unexpected_error" in text
    assert "request_id=r-17" in text
    assert "KeyError" in text
    assert "/test.Test/Do" in text
    assert SECRET not in text


async def test_errors_of_ours_get_the_request_id(log) -> None:
    """The id that the handler bound is in the metadata, and an expected error leaves no traceback."""

    async def fail(request, context):
        logs.request_id.set("r-18")
        raise UnknownVoice("x", ["a"])

    received, _ = await failure(fail)

    assert received.request_id == "r-18"
    assert log.getvalue() == ""


async def test_the_first_error_of_ours_in_a_task_group_counts(log) -> None:
    """An ExceptionGroup, nested too, is unwrapped; a bug beside it is logged."""

    async def fail(request, context):
        async def lose():
            await asyncio.sleep(0.01)
            raise StageReplicaLost("codec", "a:1", "killed")

        async def slip():
            try:
                await asyncio.sleep(5)
            finally:
                raise ZeroDivisionError("beside")

        async with asyncio.TaskGroup() as outer, asyncio.TaskGroup() as inner:
            outer.create_task(slip())
            inner.create_task(lose())

    received, _ = await failure(fail)

    assert type(received) is StageReplicaLost
    assert "ZeroDivisionError" in log.getvalue()


async def test_a_group_of_bugs_is_a_bug(log) -> None:
    """INTERNAL, with all of them in the log."""

    async def fail(request, context):
        raise ExceptionGroup("two", [ZeroDivisionError("one"), KeyError("two")])

    received, _ = await failure(fail)

    assert type(received) is InternalError
    assert "ZeroDivisionError" in log.getvalue()
    assert "KeyError" in log.getvalue()


@pytest.mark.parametrize("grouped", [False, True], ids=["plain", "in a group"])
async def test_abort_passes(log, grouped: bool) -> None:
    """What a handler said with context.abort stays as it is."""

    async def fail(request, context):
        if not grouped:
            await context.abort(grpc.StatusCode.DATA_LOSS, "said so")
        async with asyncio.TaskGroup() as group:
            group.create_task(context.abort(grpc.StatusCode.DATA_LOSS, "said so"))

    async with channel_to(fail) as channel:
        _, raw = await outcome(channel)

    assert (raw.code(), raw.details()) == (grpc.StatusCode.DATA_LOSS, "said so")
    assert log.getvalue() == ""


async def test_a_remote_error_keeps_its_code() -> None:
    """A status of gRPC's own, passed on by us, arrives with that code and without reason."""

    async def fail(request, context):
        raise RemoteError(grpc.StatusCode.OUT_OF_RANGE, "from elsewhere")

    received, raw = await failure(fail)

    assert raw.code() is grpc.StatusCode.OUT_OF_RANGE
    assert type(received) is RemoteError


async def test_an_error_that_claims_ok_is_a_bug(log) -> None:
    """A failed call must not look like a successful one without a result."""

    async def fail(request, context):
        raise RemoteError(grpc.StatusCode.OK, "odd")

    received, _ = await failure(fail)

    assert type(received) is InternalError


async def test_cancelling_reaches_the_handler_and_logs_nothing(log) -> None:
    """The handler sees CancelledError at once, whether it waits or writes, and a generator is closed."""
    ended: asyncio.Queue[str] = asyncio.Queue()

    async def wait(request, context):
        try:
            await asyncio.sleep(60)
        finally:
            ended.put_nowait("wait")

    async def write(request, context):
        try:
            while True:
                await context.write(b"x" * 100_000)
        finally:
            ended.put_nowait("write")

    async def generate(request, context):
        try:
            while True:
                yield b"x" * 100_000
        finally:
            ended.put_nowait("generate")

    async def refuse(request, context):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.put_nowait("refuse")
            raise errors.Cancelled from None

    for handler in (wait, write, generate, refuse):
        async with channel_to(handler, "unary_stream") as channel:
            call = channel.unary_stream("/test.Test/Do")(b"")
            await asyncio.sleep(0.2)

            call.cancel()

            assert await asyncio.wait_for(ended.get(), 2) == handler.__name__
            await asyncio.sleep(0.1)
    assert log.getvalue() == ""


async def test_a_cancelled_subtask_does_not_leave_the_client_waiting(log) -> None:
    """grpc.aio alone would send nothing when a handler raises CancelledError although its call was not cancelled."""

    async def fail(request, context):
        task = asyncio.create_task(asyncio.sleep(60))
        task.cancel()
        await task

    start = time.monotonic()
    received, _ = await failure(fail)

    assert type(received) is InternalError
    assert time.monotonic() - start < 5
    assert "unexpected_error" in log.getvalue()


async def test_two_writers_on_one_stream_do_not_leave_the_client_waiting(log) -> None:
    """A bug of that kind ends the call with INTERNAL."""

    async def fail(request, context):
        await asyncio.gather(*(context.write(b"x") for _ in range(3)))

    received, _ = await failure(fail, "unary_stream")

    assert type(received) is InternalError
    assert "unexpected_error" in log.getvalue()


async def test_a_retry_delay_comes_twice_and_other_trailers_stay() -> None:
    """RetryInfo for people and SDKs, grpc-retry-pushback-ms for gRPC's own retries, beside what the handler set."""

    async def fail(request, context):
        context.set_trailing_metadata((("mine", "1"),))
        raise QueueFull("router", 8, retry_after_s=0.4)

    received, raw = await failure(fail)

    metadata = dict(raw.trailing_metadata())
    assert (received.retry_after_s, metadata["grpc-retry-pushback-ms"], metadata["mine"]) == (0.4, "400", "1")


async def test_grpcs_own_retries_wait_as_told() -> None:
    """A client with a retry policy calls again after the delay, not before."""
    calls = []

    async def fail_once(request, context):
        calls.append(time.monotonic())
        if len(calls) == 1:
            raise errors.StageUnavailable("codec", "restarting", retry_after_s=0.5)
        return b"ok"

    policy = (
        '{"methodConfig": [{"name": [{}], "retryPolicy": {"maxAttempts": 3, "initialBackoff": "0.01s", "maxBackoff": "0.01s",'
        ' "backoffMultiplier": 1, "retryableStatusCodes": ["UNAVAILABLE"]}}]}'
    )
    async with channel_to(fail_once, options=[("grpc.service_config", policy)]) as channel:
        messages, _ = await outcome(channel)

    assert messages == [b"ok"]
    assert 0.45 < calls[1] - calls[0] < 2


LARGE = {
    "message": lambda: errors.Cancelled("語" * 100_000),
    "names": lambda: UnknownVoice("語" * 5000, ["語" * 500 + str(index) for index in range(1000)]),
    "violations": lambda: InvalidRequest([FieldViolation("f" * 5000, "語" * 5000, "REASON")] * 1000),
    "percent signs": lambda: errors.Cancelled("%" * 100_000),
    "stage": lambda: StageReplicaLost("s" * 10_000, "r" * 10_000, "語" * 10_000),
}


@pytest.mark.parametrize("case", LARGE)
async def test_an_error_with_endless_texts_still_arrives(case: str) -> None:
    """Code and reason survive, and the trailers stay below the limit above which gRPC replaces the status by its own."""
    sent = LARGE[case]()

    async def fail(request, context):
        raise sent

    received, raw = await failure(fail)

    assert raw.code() is sent.code
    assert type(received) is type(sent)
    assert trailers.size_bytes(rpc_status.from_call(raw)) <= trailers.MAX_TRAILER_BYTES


async def test_many_violations_keep_at_least_the_first() -> None:
    """What is cut is cut from the end."""

    async def fail(request, context):
        raise InvalidRequest([FieldViolation(f"input.{index}", "語" * 5000, "REASON") for index in range(1000)])

    received, _ = await failure(fail)

    assert received.violations
    assert received.violations[0].field == "input.0"


def test_a_small_status_is_not_touched() -> None:
    """Only what is too large is cut."""
    status = StageReplicaLost("codec", "a:1", "killed").to_status()

    assert trailers.fit(status) is status


def test_a_status_of_foreign_details_is_cut_to_its_core() -> None:
    """Details that we do not know are left out when there is no room for them; the code stays."""
    status = errors.Cancelled("why").to_status()
    status.details.add().Pack(error_details_pb2.DebugInfo(detail="x" * 50_000))

    small = trailers.fit(status)

    assert trailers.size_bytes(small) <= trailers.MAX_TRAILER_BYTES
    assert type(errors.from_status(small)) is errors.Cancelled


async def test_health_sets_its_own_statuses(log) -> None:
    """Health's NOT_FOUND passes without our details."""

    class Health(health_pb2_grpc.HealthServicer):
        async def Check(self, request, context):
            raise RuntimeError("as it is")

    server = grpc.aio.server(interceptors=[ErrorInterceptor()])
    health_pb2_grpc.add_HealthServicer_to_server(Health(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    await server.stop(None)

    assert caught.value.code() is grpc.StatusCode.UNKNOWN
    assert rpc_status.from_call(caught.value) is None


async def test_a_method_that_does_not_exist_is_unimplemented() -> None:
    """The answer is gRPC's own."""
    async with channel_to(lambda request, context: None) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/test.Test/Other")(b"")

    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
