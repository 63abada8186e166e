"""Streams that do not reach their end: closed early, broken off, not read."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from typing import Any

import pytest

from omnistage import AsyncClient, Client, OmnistageError, RemoteError, ServerUnreachable


@pytest.fixture
def endless(server: Any) -> Any:
    """A server whose streams never end."""
    server.behaviour.hang = True
    return server


def test_closing_a_stream_early_cancels_the_call(endless: Any) -> None:
    """Leaving the block of a stream before its end cancels the call in the server, and its result is refused."""
    with Client(endless.address) as client, client.stream("Hi", voice="amy") as stream:
        next(stream)
        assert stream.started is not None
        assert stream.started.request_id == "r-1"

    assert endless.cancelled.wait(5)
    assert list(stream) == []
    with pytest.raises(RuntimeError, match="not read to its end"):
        _ = stream.result


async def test_closing_an_async_stream_early_cancels_the_call(endless: Any) -> None:
    """Leaving the block of a stream before its end cancels the call in the server, and its result is refused."""
    async with AsyncClient(endless.address) as client, client.stream("Hi", voice="amy") as stream:
        await anext(stream)
        assert stream.started is not None
        assert stream.started.request_id == "r-1"

        await stream.aclose()

        assert await asyncio.to_thread(endless.cancelled.wait, 5)
        assert [chunk async for chunk in stream] == []
    with pytest.raises(RuntimeError, match="not read to its end"):
        _ = stream.result


def test_a_dropped_stream_cancels_the_call(endless: Any) -> None:
    """A loop that is left without closing the stream cancels the call once nothing refers to it."""
    with Client(endless.address) as client:
        for _ in client.stream("Hi", voice="amy"):
            break
        gc.collect()

        assert endless.cancelled.wait(5)


async def test_a_dropped_async_stream_cancels_the_call(endless: Any) -> None:
    """A loop that is left without closing the stream cancels the call once nothing refers to it."""
    async with AsyncClient(endless.address) as client:
        async for _ in client.stream("Hi", voice="amy"):
            break
        gc.collect()

        assert await asyncio.to_thread(endless.cancelled.wait, 5)


@pytest.mark.parametrize("method", ["synthesize", "stream"])
async def test_cancelling_a_task_cancels_the_call(endless: Any, method: str) -> None:
    """A task that is cancelled while it waits for the server ends as cancelled, and so does the call."""
    async with AsyncClient(endless.address) as client:

        async def work() -> None:
            if method == "synthesize":
                await client.synthesize("Hi", voice="amy")
            async for _ in client.stream("Hi", voice="amy"):
                pass

        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await work()

        assert await asyncio.to_thread(endless.cancelled.wait, 5)


def test_a_stream_that_was_never_begun_calls_nobody(server: Any) -> None:
    """Making a stream without reading it sends no request."""
    with Client(server.address) as client, client.stream("Hi", voice="amy") as stream:
        assert stream.started is None

    assert server.call_counts == {}


def test_a_failed_stream_raises_its_error_for_its_result(server: Any) -> None:
    """After a failure iteration is over and the result raises the same error."""
    server.behaviour.error = ValueError("bug")
    with Client(server.address) as client:
        stream = client.stream("Hi", voice="amy")
        with pytest.raises(OmnistageError) as caught:
            list(stream)

        assert list(stream) == []
        with pytest.raises(OmnistageError) as again:
            _ = stream.result

    assert again.value is caught.value


def test_chunks_wait_for_a_slow_reader_before_the_error(server: Any) -> None:
    """A reader that is slower than the server gets every chunk before the failure that has long happened."""
    server.behaviour.chunk_count = 6
    server.behaviour.error = ValueError("bug")
    count = 0

    def read() -> None:
        nonlocal count
        for _ in stream:
            count += 1
            time.sleep(0.05)

    with Client(server.address) as client:
        stream = client.stream("Hi", voice="amy")
        with pytest.raises(OmnistageError):
            read()

    assert count == 6


async def test_chunks_wait_for_a_slow_async_reader_before_the_error(server: Any) -> None:
    """A reader that is slower than the server gets every chunk before the failure that has long happened."""
    server.behaviour.chunk_count = 6
    server.behaviour.error = ValueError("bug")
    count = 0

    async def read() -> None:
        nonlocal count
        async for _ in stream:
            count += 1
            await asyncio.sleep(0.05)

    async with AsyncClient(server.address) as client:
        stream = client.stream("Hi", voice="amy")
        with pytest.raises(OmnistageError):
            await read()

    assert count == 6


def test_chunks_come_while_they_are_made(client: Any, server: Any) -> None:
    """The first chunk arrives long before the last one is made."""
    server.behaviour.chunk_count = 5
    server.behaviour.chunk_s = 0.2

    class Arrivals(list[Any]):
        def append(self, chunk: Any) -> None:
            super().append((time.monotonic(), server.behaviour.sent_chunk_count))

    arrivals = Arrivals()
    client.stream(arrivals, "Hi", voice="amy")

    assert arrivals[0][1] == 1
    assert arrivals[-1][0] - arrivals[0][0] > 0.6


def test_closing_the_client_ends_its_calls(endless: Any) -> None:
    """A call that waits while another thread closes the client raises, and the client can be used again."""
    client = Client(endless.address)
    failures: list[OmnistageError] = []

    def read() -> None:
        try:
            client.synthesize("Hi", voice="amy")
        except OmnistageError as error:
            failures.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    while not endless.call_counts:
        time.sleep(0.01)

    client.close()
    thread.join(5)

    assert [type(failure) for failure in failures] == [RemoteError]
    assert client.voices()
    client.close()


def test_many_threads_share_a_client(server: Any) -> None:
    """Calls from several threads at once all get their own answers."""
    labels = [f"label-{index}" for index in range(20)]
    answers: list[str] = []
    with Client(server.address) as client:

        def work(label: str) -> None:
            answers.append(client.synthesize("Hi", voice="amy", client_request_id=label).result.client_request_id)

        threads = [threading.Thread(target=work, args=(label,)) for label in labels]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)

    assert sorted(answers) == sorted(labels)


def test_a_server_that_dies_in_a_stream_is_reported(client: Any, server: Any) -> None:
    """When the connection breaks after the first chunks ServerUnreachable is raised, and nothing is tried again."""
    server.behaviour.chunk_s = 0.05  # lets the chunks arrive before the connection breaks
    server.behaviour.die = True
    server.behaviour.hang = True
    chunks: list[Any] = []

    with pytest.raises(ServerUnreachable, match="went away"):
        client.stream(chunks, "Hi", voice="amy")

    assert len(chunks) >= 2
    assert server.call_counts == {"StreamSynthesize": 1}
