"""What is tried again, and what must not be."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from omnistage import OmnistageError, QueueFull, ServerUnreachable, StageReplicaLost, StageUnavailable

SPEECH = ("synthesize", "stream")
CALLS = (*SPEECH, "voices", "pipelines", "stages")


def _arguments(method: str) -> dict[str, Any]:
    return {"text": "Hi", "voice": "amy"} if method in SPEECH else {}


def _count(server: Any) -> int:
    return sum(server.call_counts.values())


def _both(first: int, second: int) -> str:
    return f"ipv4:127.0.0.1:{first},127.0.0.1:{second}"


@pytest.mark.parametrize("method", CALLS)
def test_a_call_that_was_refused_as_unavailable_is_tried_once_more(client: Any, server: Any, method: str) -> None:
    """One UNAVAILABLE before any answer is overcome by a second attempt."""
    server.behaviour.refusals = [StageUnavailable("codec", "restarting", retry_after_s=0.05)]

    client.call(method, **_arguments(method))

    assert _count(server) == 2


@pytest.mark.parametrize("method", CALLS)
def test_attempts_are_bounded(client: Any, server: Any, method: str) -> None:
    """A call that fails with UNAVAILABLE twice is not tried a third time."""
    error = StageReplicaLost("codec", "127.0.0.1:1", "killed", retry_after_s=0.05)
    server.behaviour.refusals = [error] * 5

    with pytest.raises(StageReplicaLost):
        client.call(method, **_arguments(method))

    assert _count(server) == 2


@pytest.mark.parametrize("method", SPEECH)
def test_other_errors_are_not_tried_again(client: Any, server: Any, method: str) -> None:
    """Errors but UNAVAILABLE, also those with a retry delay, are raised after one call."""
    server.behaviour.refusals = [QueueFull("speech", 3, retry_after_s=0.01)] * 5

    with pytest.raises(QueueFull):
        client.call(method, "Hi", voice="amy")

    assert _count(server) == 1


@pytest.mark.parametrize("method", SPEECH)
def test_a_second_attempt_is_the_same_request(client: Any, server: Any, method: str) -> None:
    """A request without a seed has the same one in both attempts, and the result tells it."""
    server.behaviour.refusals = [StageUnavailable("codec", "restarting", retry_after_s=0.05)]

    result = client.call(method, "Hi", voice="amy")

    assert len(server.inputs) == 2
    assert server.inputs[0] == server.inputs[1]
    assert server.inputs[0].HasField("seed")
    assert getattr(result, "result", result).seed == server.inputs[0].seed


@pytest.mark.parametrize("method", CALLS)
def test_a_refused_connection_leads_to_the_other_server(connect: Any, server: Any, free_port: Any, method: str) -> None:
    """Where one of two servers is not there the other gets the call, once."""
    connect(_both(free_port(), server.port)).call(method, **_arguments(method))

    assert _count(server) == 1


@pytest.mark.parametrize("method", SPEECH)
def test_a_server_that_dies_before_it_answers_leads_to_the_other(connect: Any, start_server: Any, method: str) -> None:
    """A connection that breaks before any answer moves the call, with its seed, to the other server."""
    dying, other = start_server(), start_server()
    dying.behaviour.die = True
    dying.behaviour.hang = True
    dying.behaviour.chunk_count = 0
    other.behaviour.chunk_count = 2

    result = connect(_both(dying.port, other.port)).call(method, "Hi", voice="amy")

    assert (_count(dying), _count(other)) == (1, 1)
    assert dying.inputs == other.inputs
    assert getattr(result, "result", result).usage.sample_count == 2 * 1920


def test_a_stream_that_began_is_not_moved_to_the_other_server(connect: Any, start_server: Any) -> None:
    """A server that dies after the first chunks fails the stream: the other is not asked and no audio comes twice."""
    dying, other = start_server(), start_server()
    dying.behaviour.die = True
    dying.behaviour.hang = True
    dying.behaviour.chunk_s = 0.05
    chunks: list[Any] = []

    with pytest.raises(ServerUnreachable):
        connect(_both(dying.port, other.port)).stream(chunks, "Hi", voice="amy")

    assert (_count(dying), _count(other)) == (1, 0)
    offsets = [chunk.sample_offset for chunk in chunks]
    assert offsets == sorted(set(offsets))
    assert offsets


@pytest.mark.parametrize("after_head_only", [True, False])
def test_a_stream_that_began_is_not_tried_again(client: Any, server: Any, after_head_only: bool) -> None:
    """UNAVAILABLE after the head of a stream, with or without audio, is raised after one call."""
    server.behaviour.error = StageReplicaLost("codec", "127.0.0.1:1", "killed", retry_after_s=0.01)
    if after_head_only:
        server.behaviour.alter = lambda messages: [messages[0], messages[-1]]

    with pytest.raises(StageReplicaLost):
        client.stream([], "Hi", voice="amy")

    assert _count(server) == 1


def test_attempts_share_the_deadline(client: Any, server: Any) -> None:
    """A server that asks for a long pause does not make the call longer than its timeout."""
    server.behaviour.refusals = [StageUnavailable("codec", "restarting", retry_after_s=30)]

    with pytest.raises(OmnistageError) as caught:
        client.call("synthesize", "Hi", voice="amy", timeout_s=0.4)

    assert caught.value.status_code in {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE}
    assert _count(server) == 1


def test_health_is_asked_once(connect: Any, free_port: Any, server: Any) -> None:
    """Health tells what is: it is not asked again when the answer is UNAVAILABLE."""
    client = connect(f"127.0.0.1:{free_port()}")

    with pytest.raises(ServerUnreachable):
        client.call("health")

    assert connect(server.address).call("health") == "SERVING"
    server.health.set("", serving=False)
    assert connect(server.address).call("health", "") == "NOT_SERVING"
