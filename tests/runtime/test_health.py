"""stage_runtime.health: Check, Watch and List over a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import time

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stage_runtime.config import ServerSettings
from stage_runtime.health import HealthServicer
from stage_runtime.server import open_server

UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@contextlib.asynccontextmanager
async def served(health, register=lambda server: [], options=()):
    """A server with this health, and a stub for it."""
    server = await open_server(["127.0.0.1:0"], ServerSettings(), register, health)
    try:
        async with grpc.aio.insecure_channel(server.addresses[0], options=options) as channel:
            yield channel, health_pb2_grpc.HealthStub(channel)
    finally:
        await server.stop(0)


def named(name):
    return health_pb2.HealthCheckRequest(service=name)


async def check(stub, name="", timeout=5):
    return (await stub.Check(named(name), timeout=timeout)).status


async def next_status(watch, timeout=5):
    return (await asyncio.wait_for(watch.read(), timeout)).status


async def test_every_name_starts_not_serving() -> None:
    """The process, given names and registered services are NOT_SERVING until they are set, also before the server starts."""
    health = HealthServicer(["stage/codec", "a.Service"])
    health.set("a.Service", serving=True)

    async with served(health) as (_, stub):
        assert await check(stub) == NOT_SERVING
        assert await check(stub, "stage/codec") == NOT_SERVING
        assert await check(stub, "a.Service") == SERVING


async def test_check_of_an_unknown_name_is_not_found() -> None:
    """As the protocol says; and a name of a megabyte does not come back in the message."""
    async with served(HealthServicer()) as (_, stub):
        for name in ("nobody", "x" * 2**20):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await check(stub, name)

            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
            assert len(caught.value.details()) < 300


async def test_list_tells_all_names() -> None:
    """List answers with every known name and its state."""
    health = HealthServicer(["stage/codec"])
    health.set("", serving=True)

    async with served(health) as (_, stub):
        response = await stub.List(health_pb2.HealthListRequest(), timeout=5)

    assert {name: each.status for name, each in response.statuses.items()} == {"": SERVING, "stage/codec": NOT_SERVING}


async def test_watch_pushes_changes_within_half_a_second() -> None:
    """The first message comes at once, and one after each change."""
    health = HealthServicer()
    async with served(health) as (_, stub):
        watch = stub.Watch(named(""))
        assert await next_status(watch) == NOT_SERVING

        for serving in (True, False, True):
            health.set("", serving=serving)
            assert await next_status(watch, timeout=0.5) == (SERVING if serving else NOT_SERVING)


async def test_watch_of_an_unknown_name_says_so_and_follows_it() -> None:
    """SERVICE_UNKNOWN first; when the name appears, its state."""
    health = HealthServicer()
    async with served(health) as (_, stub):
        watch = stub.Watch(named("late"))
        assert await next_status(watch) == UNKNOWN

        health.add("late")
        assert await next_status(watch, timeout=0.5) == NOT_SERVING
        health.set("late", serving=True)
        assert await next_status(watch, timeout=0.5) == SERVING


async def test_watch_is_silent_without_a_change() -> None:
    """Setting the same state again, or another name, sends nothing."""
    health = HealthServicer()
    async with served(health) as (_, stub):
        watch = stub.Watch(named(""))
        await next_status(watch)

        health.set("", serving=False)
        health.set("other", serving=True)
        with pytest.raises(TimeoutError):
            await next_status(watch, timeout=0.3)


async def test_shutdown_is_for_good() -> None:
    """After shutdown everything is NOT_SERVING, whatever is set later; watchers are told."""
    health = HealthServicer(["a"])
    health.set("a", serving=True)
    async with served(health) as (_, stub):
        watch = stub.Watch(named("a"))
        assert await next_status(watch) == SERVING

        health.shutdown()
        health.set("a", serving=True)
        health.set("b", serving=True)

        assert await next_status(watch) == NOT_SERVING
        assert await check(stub, "a") == NOT_SERVING
        assert await check(stub, "b") == NOT_SERVING


async def test_close_ends_watch_streams_after_they_told() -> None:
    """Watchers get NOT_SERVING, then the end of the stream; a later Watch gets one message and ends."""
    health = HealthServicer()
    health.set("", serving=True)
    async with served(health) as (_, stub):
        watch = stub.Watch(named(""))
        assert await next_status(watch) == SERVING

        health.close()

        assert await next_status(watch) == NOT_SERVING
        assert await asyncio.wait_for(watch.read(), 5) is grpc.aio.EOF
        assert [each.status async for each in stub.Watch(named(""), timeout=5)] == [NOT_SERVING]


async def test_health_answers_while_everything_else_is_busy() -> None:
    """With 100 long calls and 20 Watch streams open, 50 of 50 probes with a time-out of 0.5 s say SERVING (case C41)."""

    async def sleep(request, context):
        await asyncio.sleep(60)

    def register(server):
        handlers = {"Sleep": grpc.unary_unary_rpc_method_handler(sleep)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Test", handlers),))
        return []

    health = HealthServicer()
    health.set("", serving=True)
    async with served(health, register) as (channel, stub):
        calls = [channel.unary_unary("/test.Test/Sleep")(b"") for _ in range(100)]
        watches = [stub.Watch(named("")) for _ in range(20)]
        assert [await next_status(watch) for watch in watches] == [SERVING] * 20

        assert [await check(stub, timeout=0.5) for _ in range(50)] == [SERVING] * 50

        for call in (*calls, *watches):
            call.cancel()


async def test_a_thousand_watchers_cost_the_others_nothing() -> None:
    """A change reaches 1 000 watchers of one name, and Check is answered meanwhile."""
    health = HealthServicer()
    async with served(health) as (_, stub):
        watches = [stub.Watch(named("")) for _ in range(1000)]
        await asyncio.gather(*(next_status(watch, timeout=20) for watch in watches))

        health.set("", serving=True)
        start = time.monotonic()
        assert await check(stub) == SERVING
        assert time.monotonic() - start < 1
        assert set(await asyncio.gather(*(next_status(watch, timeout=20) for watch in watches))) == {SERVING}

        for watch in watches:
            watch.cancel()


async def test_a_watcher_that_does_not_read_holds_up_nobody() -> None:
    """Changes pile up unread until flow control stops that stream; another watcher sees each change at once."""
    health = HealthServicer()
    blocked = asyncio.Event()

    class Context:
        """A context whose client never reads."""

        async def write(self, message):
            blocked.set()
            await asyncio.Event().wait()

    stuck = asyncio.create_task(health.Watch(named(""), Context()))
    async with served(health) as (_, stub):
        await blocked.wait()
        watch = stub.Watch(named(""))
        assert await next_status(watch) == NOT_SERVING

        for serving in [True, False] * 50:
            health.set("", serving=serving)
            assert await next_status(watch, timeout=0.5) == (SERVING if serving else NOT_SERVING)

    stuck.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await stuck


async def test_watchers_that_left_are_forgotten() -> None:
    """Nothing of a cancelled Watch stays, also for names that never existed."""
    health = HealthServicer()
    async with served(health) as (_, stub):
        watches = [stub.Watch(named(f"name {index}")) for index in range(10)]
        await asyncio.gather(*(next_status(watch) for watch in watches))
        assert len(health._watchers) == 10

        for watch in watches:
            watch.cancel()

        async with asyncio.timeout(5):
            while health._watchers:
                await asyncio.sleep(0.01)
