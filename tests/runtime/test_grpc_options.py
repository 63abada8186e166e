"""stage_runtime.grpc_options: keepalive with real processes that are stopped, silent or busy; limits; connections."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time

import grpc
import grpc.aio
import pytest

from stage_runtime import grpc_options
from stage_runtime.config import ServerSettings
from stage_runtime.grpc_options import channel_options, server_options

LIMIT = 8 * 2**20


def channel_to(address, **options):
    return grpc.aio.insecure_channel(address, options=channel_options(LIMIT, **options))


@pytest.mark.slow
async def test_a_stopped_server_is_noticed_within_six_seconds(serve) -> None:
    """A call to a server that gets SIGSTOP ends with UNAVAILABLE after 2 to 6 seconds, long before its deadline."""
    process, (address,) = serve("127.0.0.1:0")
    async with channel_to(address) as channel:
        call = channel.unary_unary("/test.Test/Sleep")(b"60", timeout=60)
        await asyncio.sleep(0.5)

        process.send_signal(signal.SIGSTOP)
        start = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call

        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert 2 <= time.monotonic() - start < 6


@pytest.mark.slow
async def test_a_silent_call_of_twelve_seconds_survives_eager_keepalive(serve) -> None:
    """Pings each half second neither make the server cut the connection nor need its interpreter lock to be answered."""
    _, (sleeper,) = serve("127.0.0.1:0")
    _, (holder,) = serve("127.0.0.1:0")
    async with channel_to(sleeper, keepalive_time_s=0.5) as first, channel_to(holder, keepalive_time_s=0.5) as second:
        results = await asyncio.gather(
            first.unary_unary("/test.Test/Sleep")(b"12", timeout=30),
            second.unary_unary("/test.Test/Hold")(b"12", timeout=30),
        )

    assert results == [b"done", b"done"]


async def test_an_idle_channel_that_pings_is_not_punished(serve) -> None:
    """Three seconds of pings without any call leave the connection as it was: the next call comes from the same port."""
    _, (address,) = serve("127.0.0.1:0")
    async with channel_to(address, keepalive_time_s=0.2) as channel:
        peer = channel.unary_unary("/test.Test/Peer")
        before = await peer(b"", timeout=5)

        await asyncio.sleep(3)

        assert await peer(b"", timeout=5) == before


CLIENT = """
import asyncio, sys
import grpc.aio

async def main():
    async with grpc.aio.insecure_channel(sys.argv[1]) as channel:
        await channel.unary_unary("/test.Test/Wait")(b"")

asyncio.run(main())
"""


async def test_a_server_notices_a_stopped_client(monkeypatch) -> None:
    """The handler of a client that gets SIGSTOP is cancelled after the server's keepalive time and time-out."""
    monkeypatch.setattr(grpc_options, "SERVER_KEEPALIVE_TIME_S", 1.0)
    monkeypatch.setattr(grpc_options, "SERVER_KEEPALIVE_TIMEOUT_S", 1.0)
    called, cancelled = asyncio.Event(), asyncio.Event()

    async def wait(request, context):
        called.set()
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    server = grpc.aio.server(options=server_options(ServerSettings()))
    handlers = {"Wait": grpc.unary_unary_rpc_method_handler(wait)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Test", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = subprocess.Popen([sys.executable, "-c", CLIENT, f"127.0.0.1:{port}"])
    try:
        await asyncio.wait_for(called.wait(), 20)

        client.send_signal(signal.SIGSTOP)

        await asyncio.wait_for(cancelled.wait(), 8)
    finally:
        client.kill()
        client.wait()
        await server.stop(None)


async def test_messages_up_to_the_limit_pass_in_both_directions(serve) -> None:
    """Messages above gRPC's default of 4 MiB pass; those above our limit are refused with RESOURCE_EXHAUSTED."""
    _, (address,) = serve("127.0.0.1:0")
    async with channel_to(address) as channel, grpc.aio.insecure_channel(address) as unlimited:
        size = channel.unary_unary("/test.Test/Size")

        assert await size(b"x" * (LIMIT - 100), timeout=20) == str(LIMIT - 100).encode()
        assert len(await size(str(LIMIT - 100).encode(), timeout=20)) == LIMIT - 100
        with pytest.raises(grpc.aio.AioRpcError) as sent:
            await unlimited.unary_unary("/test.Test/Size")(b"x" * (LIMIT + 1), timeout=20)
        with pytest.raises(grpc.aio.AioRpcError) as received:
            await size(str(LIMIT + 1).encode(), timeout=20)

    assert sent.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert received.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("own", [True, False], ids=["own connections", "shared connection"])
async def test_local_subchannel_pool_gives_a_connection_of_its_own(serve, own: bool) -> None:
    """Two channels to one server use two connections exactly if asked to."""
    _, (address,) = serve("127.0.0.1:0")
    async with (
        channel_to(address, local_subchannel_pool=own) as one,
        channel_to(address, local_subchannel_pool=own) as two,
    ):
        peers = {await channel.unary_unary("/test.Test/Peer")(b"", timeout=5) for channel in (one, two)}

    assert len(peers) == (2 if own else 1)


async def test_a_channel_is_back_soon_after_its_server_is(serve, free_port) -> None:
    """After the server was away for three seconds, a channel with a short backoff reaches its successor within two."""
    listen = f"127.0.0.1:{free_port()}"
    process, _ = serve(listen)
    async with channel_to(listen, max_reconnect_backoff_s=0.5) as channel:
        peer = channel.unary_unary("/test.Test/Peer")
        await peer(b"", timeout=5)
        process.kill()
        process.wait()
        for _ in range(6):
            with pytest.raises(grpc.aio.AioRpcError):
                await peer(b"", timeout=5)
            await asyncio.sleep(0.5)

        serve(listen)

        assert await peer(b"", timeout=2, wait_for_ready=True)


async def test_the_environments_proxy_is_not_used_by_default(serve, monkeypatch) -> None:
    """By itself gRPC sends even loopback traffic to http_proxy."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    _, (address,) = serve("127.0.0.1:0")
    async with channel_to(address, local_subchannel_pool=True) as channel:
        assert await channel.unary_unary("/test.Test/Peer")(b"", timeout=5)
