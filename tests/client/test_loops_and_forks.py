"""Clients across event loops, threads and forks; in processes of their own where they fork."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from omnistage import AsyncClient, Client, DeadlineExceeded, forks

# A forked child calls the server; the parent prints how it ended and how long that took.
PRELUDE = textwrap.dedent("""
    import asyncio, os, signal, sys, threading, time
    from omnistage import AsyncClient, Client

    ADDRESS = sys.argv[1]

    def in_child(work):
        start = time.monotonic()
        pid = os.fork()
        if pid == 0:
            try:
                print("child:", work(), flush=True)
            except BaseException as error:
                print("child:", type(error).__name__, error, flush=True)
            os._exit(0)
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            if time.monotonic() - start > 3.5:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                print("child: hung", flush=True)
                break
            time.sleep(0.01)

    def read(client):
        with client.stream("Hi", voice="amy", timeout_s=3) as stream:
            return len(list(stream))
""")


def run(script: str, server: Any) -> list[str]:
    """Lines that a script printed, run by an interpreter of its own with warnings as errors."""
    command = [sys.executable, "-W", "error", "-c", PRELUDE + textwrap.dedent(script), server.address]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Traceback" not in result.stderr, result.stderr
    return result.stdout.splitlines()


def test_a_client_made_at_import_time_works_in_one_event_loop_after_another(server: Any) -> None:
    """An AsyncClient made outside of any loop is used by two runs of asyncio, with calls and with a stream, without a warning."""
    script = """
        client = AsyncClient(ADDRESS)

        async def speak():
            clip = await client.synthesize("Hi", voice="amy")
            chunks = [chunk async for chunk in client.stream("Hi", voice="amy")]
            return len(clip.audio), len(chunks)

        print(asyncio.run(speak()), asyncio.run(speak(), debug=True))
        print(len(client._connections))
    """

    assert run(script, server) == ["(11564, 3) (11564, 3)", "0"]


def test_a_loop_that_is_closed_without_care_does_no_harm(server: Any) -> None:
    """Where a loop is dropped with its connection open the client opens another one in the next loop."""
    script = """
        client = AsyncClient(ADDRESS)
        for _ in range(3):
            loop = asyncio.new_event_loop()
            print(len(loop.run_until_complete(client.voices())))
            loop.close()
        print(len(client._connections))
    """

    assert run(script, server) == ["2", "2", "2", "1"]


def test_loops_of_several_threads_share_a_client(server: Any) -> None:
    """One AsyncClient serves loops that run at the same time in different threads."""
    client = AsyncClient(server.address)
    counts: list[int] = []

    async def speak() -> int:
        clips = await asyncio.gather(*(client.synthesize("Hi", voice="amy") for _ in range(5)))
        return len({clip.result.seed for clip in clips})

    threads = [threading.Thread(target=lambda: counts.append(asyncio.run(speak()))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)

    assert counts == [5, 5, 5]


async def test_first_calls_at_the_same_time_share_a_connection(server: Any) -> None:
    """Many tasks that use a new client at once open one connection."""
    async with AsyncClient(server.address) as client:
        answers = await asyncio.gather(*(client.voices() for _ in range(20)))

        assert len(client._connections) == 1
    assert [len(voices) for voices in answers] == [2] * 20
    assert len(client._connections) == 0


async def test_a_closed_client_connects_anew(server: Any) -> None:
    """close() may come at any time, twice too, and the next call opens a connection again."""
    client = AsyncClient(server.address)
    await client.close()
    await client.voices()
    await client.close()
    await client.close()

    assert len(await client.voices()) == 2

    await client.close()


@pytest.mark.parametrize("used", ["client.voices()", "pass"], ids=["after use", "before use"])
def test_a_forked_child_uses_the_client_of_its_parent(server: Any, used: str) -> None:
    """A child calls and streams with the very client, used before or not, that the parent goes on using."""
    script = f"""
        client = Client(ADDRESS)
        {used}
        for _ in range(3):
            in_child(lambda: (len(client.voices(timeout_s=3)), read(client), client.close()))
            in_child(client.close)
            print("parent:", len(client.voices(timeout_s=3)))
    """

    assert run(script, server) == ["child: (2, 3, None)", "child: None", "parent: 2"] * 3


def test_a_child_forked_after_async_calls_can_use_both_clients(server: Any) -> None:
    """After the parent's event loops ended, a child uses the sync client, and the async one in a loop of its own."""
    script = """
        client, other = AsyncClient(ADDRESS), Client(ADDRESS)
        asyncio.run(client.voices())
        asyncio.run(client.voices())
        in_child(lambda: len(other.voices(timeout_s=3)))
        in_child(lambda: len(asyncio.run(client.voices(timeout_s=3))))
        print("parent:", len(asyncio.run(client.voices())), len(other.voices()))
    """

    assert run(script, server) == ["child: 2", "child: 2", "parent: 2 2"]


def test_a_child_of_a_child_can_use_the_client(server: Any) -> None:
    """Forks may be nested."""
    script = """
        client = Client(ADDRESS)
        client.voices()

        def work():
            count = len(client.voices(timeout_s=3))
            in_child(lambda: len(client.voices(timeout_s=3)))
            return count

        in_child(work)
        print("parent:", len(client.voices(timeout_s=3)))
    """

    assert run(script, server) == ["child: 2", "child: 2", "parent: 2"]


def test_forked_workers_of_multiprocessing_can_use_the_client(server: Any) -> None:
    """A pool of forked processes calls the server with the client it inherited."""
    script = """
        import multiprocessing

        client = Client(ADDRESS)

        def work(_):
            return len(client.voices(timeout_s=3))

        client.voices()
        with multiprocessing.get_context("fork").Pool(3) as pool:
            print(pool.map(work, range(6)))
    """

    assert run(script, server) == ["[2, 2, 2, 2, 2, 2]"]


def test_without_a_server_a_forked_child_fails_in_time(server: Any) -> None:
    """A child whose server is gone gets an error at once."""
    script = """
        client = Client(ADDRESS)
        client.voices()
        other = Client("127.0.0.1:1")
        in_child(lambda: other.voices(timeout_s=3))
    """

    (line,) = run(script, server)

    assert line.startswith("child: ServerUnreachable the server at 127.0.0.1:1 cannot be reached")


def test_a_child_forked_in_the_middle_of_a_call_is_told_so(server: Any) -> None:
    """In a child forked while gRPC was at work every client refuses at once, and the parent goes on."""
    # A real call would do, but gRPC sometimes damages such a child so much that it cannot even tell.
    script = """
        from omnistage import forks
        work = threading.Event()
        forks.begin(work)
        client = Client(ADDRESS)
        in_child(lambda: client.voices())
        in_child(lambda: read(client))
        in_child(lambda: asyncio.run(AsyncClient(ADDRESS).voices()))
        print("parent:", len(client.voices()))
        forks.end(work)
        in_child(lambda: len(client.voices(timeout_s=3)))
    """

    *refused, parent, child = run(script, server)

    message = "child: RuntimeError this process was forked while calls of an omnistage client were in flight"
    assert [line[: len(message)] for line in refused] == [message] * 3
    assert (parent, child) == ("parent: 2", "child: 2")


def _call(address: str) -> None:
    with Client(address) as client, suppress(DeadlineExceeded):
        client.synthesize("Hi", voice="amy", timeout_s=1)


def _stream(address: str) -> None:
    with Client(address) as client, suppress(DeadlineExceeded):
        list(client.stream("Hi", voice="amy", timeout_s=1))


def _call_async(address: str) -> None:
    async def speak() -> None:
        with suppress(DeadlineExceeded):
            await AsyncClient(address).synthesize("Hi", voice="amy", timeout_s=1)

    asyncio.run(speak())


@pytest.mark.parametrize("work", [_call, _stream, _call_async])
def test_calls_in_flight_are_known_to_the_guard_of_forks(server: Any, work: Callable[[str], None]) -> None:
    """While a call waits, a fork would be noticed as one in the middle of it; after its end it would not."""
    server.behaviour.hang = True
    before = len(forks._at_work)
    thread = threading.Thread(target=work, args=(server.address,))

    thread.start()
    while not server.call_counts:
        time.sleep(0.01)
    during = len(forks._at_work)
    thread.join(10)

    assert (during - before, len(forks._at_work) - before) == (1, 0)
