"""Every failure of a call is one of our error classes, with all that the server said."""

from __future__ import annotations

import time
from typing import Any

import grpc
import pytest
from google.rpc import status_pb2

from omnistage import DeadlineExceeded, OmnistageError, RemoteError, ServerUnreachable
from stage_runtime.errors import FieldViolation, all_errors

REASONS = sorted(all_errors())
METHODS = ("synthesize", "stream", "voices", "pipelines", "stages", "server")


def make(reason: str) -> OmnistageError:
    """An error of the class with everything that an error can carry."""
    cls = all_errors()[reason]
    error = cls.__new__(cls)
    OmnistageError.__init__(
        error,
        f"what went wrong: {reason}, für Menschen",
        metadata={"stage": "codec", "replica": "127.0.0.1:1", "requestId": "r-1"},
        retry_after_s=0.05,
        violations=[FieldViolation("input.text", "is empty", "REQUIRED")],
        resource=("voice", "amy"),
    )
    return error


def facts(error: OmnistageError) -> Any:
    return (
        type(error),
        error.message,
        error.status_code,
        error.metadata,
        error.retry_after_s,
        error.violations,
        error.resource,
    )


@pytest.mark.parametrize("method", ["synthesize", "stream"])
@pytest.mark.parametrize("reason", REASONS)
def test_every_error_of_the_server_is_raised_as_its_class(client: Any, server: Any, reason: str, method: str) -> None:
    """Class, message, code, metadata, retry delay, violations and resource arrive, from both synthesis methods."""
    error = make(reason)
    server.behaviour.refusals = [error, error]  # a second one for calls that are tried again

    with pytest.raises(OmnistageError) as caught:
        client.call(method, "Hi", voice="amy")

    assert facts(caught.value) == facts(error)
    assert (caught.value.request_id, caught.value.stage, caught.value.replica) == ("r-1", "codec", "127.0.0.1:1")


@pytest.mark.parametrize("reason", REASONS)
def test_errors_in_the_middle_of_a_stream_come_after_its_chunks(client: Any, server: Any, reason: str) -> None:
    """The chunks made before a failure are delivered, then its class is raised, and the call is made once only."""
    error = make(reason)
    server.behaviour.error = error
    chunks: list[Any] = []

    with pytest.raises(OmnistageError) as caught:
        client.stream(chunks, "Hi", voice="amy")

    assert facts(caught.value) == facts(error)
    assert [chunk.sample_offset for chunk in chunks] == [0, 1920, 3840]
    assert server.call_counts == {"StreamSynthesize": 1}


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
@pytest.mark.parametrize("method", ["synthesize", "stream"])
def test_statuses_without_details_keep_their_code(client: Any, server: Any, code: grpc.StatusCode, method: str) -> None:
    """A status that is not ours is a RemoteError with its code and message, but for the two that gRPC itself makes."""
    server.behaviour.abort = (code, "not ours")
    special = {
        grpc.StatusCode.UNAVAILABLE: (ServerUnreachable, "cannot be reached"),
        grpc.StatusCode.DEADLINE_EXCEEDED: (DeadlineExceeded, "deadline passed"),
    }
    expected, text = special.get(code, (RemoteError, "not ours"))

    with pytest.raises(OmnistageError, match=text) as caught:
        client.call(method, "Hi", voice="amy")

    assert type(caught.value) is expected
    assert caught.value.status_code is code


@pytest.mark.parametrize(
    "details",
    [
        b"\xff\xff\xff",
        status_pb2.Status(code=5, message="other code").SerializeToString(),
        status_pb2.Status(code=13, message="other message").SerializeToString(),
    ],
    ids=["damaged", "other code", "other message"],
)
def test_details_that_contradict_the_status_are_left_aside(client: Any, server: Any, details: bytes) -> None:
    """If the rich status is damaged or not the one that was sent, the plain one counts."""
    server.behaviour.abort = (grpc.StatusCode.INTERNAL, "plain")
    server.behaviour.trailers = (("grpc-status-details-bin", details),)

    with pytest.raises(RemoteError, match="plain") as caught:
        client.call("synthesize", "Hi", voice="amy")

    assert caught.value.status_code is grpc.StatusCode.INTERNAL


def test_errors_of_other_domains_are_remote_errors(client: Any, server: Any) -> None:
    """A rich status with an ErrorInfo of somebody else's is a RemoteError with its code and message."""
    status = make("VOICE_NOT_FOUND").to_status()
    status.details[0].value = status.details[0].value.replace(b"omnistage", b"elsewhere")
    server.behaviour.abort = (grpc.StatusCode.NOT_FOUND, status.message)
    server.behaviour.trailers = (("grpc-status-details-bin", status.SerializeToString()),)

    with pytest.raises(RemoteError) as caught:
        client.call("synthesize", "Hi", voice="amy")

    assert facts(caught.value)[1:3] == (status.message, grpc.StatusCode.NOT_FOUND)


@pytest.mark.parametrize("method", METHODS)
def test_no_server_is_an_error_that_tells_address_and_remedy(connect: Any, free_port: Any, method: str) -> None:
    """A refused connection raises at once, names the address, the cause and what to do, and is an UNAVAILABLE."""
    address = f"127.0.0.1:{free_port()}"
    arguments: dict[str, Any] = {"text": "Hi", "voice": "amy"} if method in {"synthesize", "stream"} else {}
    start = time.monotonic()

    with pytest.raises(ServerUnreachable, match=r"omnistage up.*refused") as caught:
        connect(address).call(method, **arguments)

    assert address in caught.value.message
    assert caught.value.address == address
    assert caught.value.status_code is grpc.StatusCode.UNAVAILABLE
    assert time.monotonic() - start < 3


@pytest.mark.parametrize("method", ["synthesize", "stream"])
def test_a_timeout_ends_the_call_on_both_sides(client: Any, server: Any, method: str) -> None:
    """When timeout_s has passed DeadlineExceeded is raised and the server stops its work."""
    server.behaviour.hang = True
    start = time.monotonic()

    with pytest.raises(DeadlineExceeded, match=f"waiting for the server at {server.address}"):
        client.call(method, "Hi", voice="amy", timeout_s=0.3)

    assert 0.25 < time.monotonic() - start < 2
    assert server.cancelled.wait(5)


@pytest.mark.parametrize("code", [grpc.StatusCode.UNKNOWN])
@pytest.mark.parametrize("method", ["voices", "pipelines", "stages", "server"])
def test_calls_for_facts_map_their_errors_too(client: Any, server: Any, method: str, code: grpc.StatusCode) -> None:
    """Errors of the calls that only ask are mapped as those of synthesis."""
    server.behaviour.refusals = [make("MODEL_NOT_FOUND")]
    with pytest.raises(OmnistageError) as caught:
        client.call(method)
    server.behaviour.abort = (code, "plain")
    with pytest.raises(RemoteError, match="plain"):
        client.call(method)

    assert facts(caught.value) == facts(make("MODEL_NOT_FOUND"))


def test_an_unknown_service_has_no_health(client: Any) -> None:
    """Asking for the health of a service that the server does not know is a NOT_FOUND."""
    with pytest.raises(RemoteError) as caught:
        client.call("health", "nope")

    assert caught.value.status_code is grpc.StatusCode.NOT_FOUND
