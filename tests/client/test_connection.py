"""How clients find and keep their server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from omnistage import AsyncClient, Client, ServerUnreachable, connection

GOOD = [
    "localhost:50051",
    "router.example:1",
    "10.0.0.1:65535",
    "[::1]:50051",
    "unix:/run/omnistage.sock",
    "unix:relative.sock",
    "unix:///run/omnistage.sock",
    "dns:///router:50051",
    "dns:router:50051",
    "ipv4:10.0.0.1:1,10.0.0.2:2",
    "ipv6:[::1]:50051",
]
BAD = [
    "",
    "localhost",
    ":50051",
    "localhost:",
    "localhost:0",
    "localhost:65536",
    "localhost:port",
    "::1:50051",
    "http://localhost:50051",
    "grpc://localhost:50051",
    "dns:///router",
    "unix:",
    "unix:///",
    "local host:50051",
]


@pytest.mark.parametrize("address", GOOD)
def test_addresses_of_servers_are_taken(address: str) -> None:
    """Every documented form of an address makes a client."""
    assert Client(address).address == address
    assert AsyncClient(address).address == address


@pytest.mark.parametrize("address", BAD)
@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_faulty_addresses_are_refused_at_once(kind: Any, address: str) -> None:
    """An address that gRPC would take for something else, or give a port of its own, is refused with the right forms."""
    with pytest.raises(
        ValueError, match=r"none of host:port, \[ipv6\]:port, unix:/path/to/socket and dns:///name:port"
    ):
        kind(address)


@pytest.mark.parametrize("scheme", ["unix:", "unix://"])
def test_a_unix_socket_is_an_address(connect: Any, start_server: Any, socket_dir: Path, scheme: str) -> None:
    """A server at a Unix socket is reached by its path."""
    start_server(f"unix:{socket_dir / 's.sock'}")

    client = connect(f"{scheme}{socket_dir / 's.sock'}")

    assert [voice.name for voice in client.call("voices")] == ["amy", "bob"]


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "dns:///localhost"])
def test_names_are_resolved(connect: Any, server: Any, host: str) -> None:
    """A server is reached by name, by number, and by a dns:/// name."""
    assert connect(f"{host}:{server.port}").call("voices", "speech")


def test_this_machine_is_not_reached_through_a_proxy(server: Any, free_port: Any) -> None:
    """The proxy that the environment names is not asked for a server of this machine."""
    proxy = f"http://127.0.0.1:{free_port()}"
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    environment |= dict.fromkeys(("http_proxy", "https_proxy", "grpc_proxy"), proxy)
    script = f"""
import asyncio, omnistage
for host in ("localhost", "127.0.0.1", "dns:///localhost", "ipv4:127.0.0.1"):
    address = f"{{host}}:{server.port}"
    print(len(omnistage.Client(address).voices()), len(asyncio.run(omnistage.AsyncClient(address).voices())))
"""

    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
    )

    assert result.stdout == "2 2\n" * 4, result.stderr


def test_a_clip_may_be_larger_than_grpcs_own_limit(client: Any, server: Any) -> None:
    """Two minutes of float samples, 11 MB, arrive in one message."""
    server.behaviour.chunk_count = 1500

    clip = client.call("synthesize", "Hi", voice="amy", encoding="f32")

    assert len(clip.audio) == 1500 * 1920 * 4


def test_a_client_finds_a_server_that_came_back(connect: Any, start_server: Any, free_port: Any) -> None:
    """After an outage the same client works again as soon as the server does."""
    address = f"127.0.0.1:{free_port()}"
    client = connect(address)
    first = start_server(address)
    assert client.call("voices")
    first.run(first.stop())
    with pytest.raises(ServerUnreachable):
        client.call("voices")

    start_server(address)

    deadline = time.monotonic() + 10
    while True:
        try:
            assert client.call("voices")
        except ServerUnreachable:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        else:
            break


FROZEN = textwrap.dedent("""
    import asyncio, sys
    import grpc

    async def main():
        async def never(request, context):
            print("called", flush=True)
            await asyncio.Event().wait()

        method = grpc.unary_unary_rpc_method_handler(never)
        handler = grpc.method_handlers_generic_handler("omnistage.v1.SpeechService", {"Synthesize": method})
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((handler,))
        print(server.add_insecure_port("127.0.0.1:0"), flush=True)
        await server.start()
        await server.wait_for_termination()

    asyncio.run(main())
""")


def test_a_server_that_was_stopped_is_noticed_without_a_timeout(connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call without timeout to a server that froze in the middle ends within keepalive time and timeout."""
    monkeypatch.setattr(connection, "KEEPALIVE_TIME_S", 0.5)
    monkeypatch.setattr(connection, "KEEPALIVE_TIMEOUT_S", 0.5)
    process = subprocess.Popen([sys.executable, "-c", FROZEN], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        client = connect(f"127.0.0.1:{process.stdout.readline().strip()}")
        start = time.monotonic()
        process_stops = subprocess.Popen(["sh", "-c", f"sleep 1; kill -STOP {process.pid}"])
        with pytest.raises(ServerUnreachable):
            client.call("synthesize", "Hi", voice="amy")
        assert time.monotonic() - start < 15
        process_stops.wait()
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.communicate()


def test_facts_of_the_server_come_in_plain_types(client: Any) -> None:
    """Voices, server, pipelines and stages are dataclasses with seconds, words and derived figures."""
    server = client.call("server")
    (pipeline,) = client.call("pipelines")
    codec_a, codec_b = client.call("stages")
    up, lost = codec_a.replicas

    assert (server.version, server.uptime_s) == ("9.8.7", 3700.0)
    assert [(voice.name, voice.model, voice.language_codes) for voice in client.call("voices")] == [
        ("amy", "speech", ("en",)),
        ("bob", "speech", ()),
    ]
    assert client.call("voices", "other") == []
    assert (pipeline.name, pipeline.serving, pipeline.finished_counts) == ("speech", True, {"OK": 12, "CANCELLED": 1})
    assert (pipeline.stages[0].role, pipeline.stages[0].up_count, pipeline.limits.max_frames) == ("codec", 1, 2048)
    assert (up.state, up.load.mean_batch_size, up.load.busy_s, up.lost_count) == ("up", 2.5, 1.5, 1)
    assert (lost.state, lost.load.mean_batch_size) == ("lost", 0.0)
    assert codec_b.replicas == ()
