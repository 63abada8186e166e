"""The client for code without an event loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Protocol, Self, TypeVar, Unpack

import grpc
from google.protobuf.message import Message

from omnistage import calls, forks
from omnistage.calls import SHORT_TIMEOUT_S, SpeechOptions, StreamCall, UnaryCall
from omnistage.connection import DEFAULT_ADDRESS, check_address, deadline_passed, error_of, open_options
from omnistage.encodings import Encoding
from omnistage.speech import AudioChunk, Clip, SpeechReader, SpeechResult, SpeechStarted, Voice
from omnistage.system import Pipeline, Server, Stage
from omnistage.v1 import speech_pb2
from stage_runtime.errors import OmnistageError

R = TypeVar("R", bound=Message)
T = TypeVar("T")

# gRPC ends calls at their deadlines. Should it be unable to, as in the child of an unlucky fork, the wait ends this much later.
_LATE_S = 0.25


class _Responses(Protocol):
    """What a streaming call gives."""

    def __iter__(self) -> Iterator[speech_pb2.StreamSynthesizeResponse]: ...

    def cancel(self) -> object: ...


class Client:
    """Calls a server from any thread; connects when it is first used.

    Failures raise OmnistageError: the class that the server raised, DeadlineExceeded if `timeout_s` passed, ServerUnreachable if there
    is no server, RemoteError for other statuses. A `timeout_s` of None waits as long as the server is there.

    It may be made before a fork and used on both sides, if no call is in flight at the fork (else RuntimeError in the child).
    """

    def __init__(self, address: str = DEFAULT_ADDRESS) -> None:
        """`address` is host:port, unix:/path/to/socket or dns:///name:port; raises ValueError if it is none of these."""
        self.address = check_address(address)
        self._channel: grpc.Channel | None = None
        self._pid = 0
        # Channels of the parent process: to destroy one here could end the parent's connection.
        self._inherited: list[grpc.Channel] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; calls in flight fail. The client connects anew if it is used again."""
        self._leave_inherited()
        if self._channel is not None:
            self._channel.close()
        self._channel = None

    def synthesize(
        self,
        text: str,
        *,
        voice: str,
        encoding: Encoding = "wav",
        timeout_s: float | None = None,
        **options: Unpack[SpeechOptions],
    ) -> Clip:
        """Speak `text` and return the whole clip."""
        return self._call(calls.synthesize(text, voice, encoding, options), timeout_s)

    def stream(
        self,
        text: str,
        *,
        voice: str,
        encoding: Encoding = "pcm",
        timeout_s: float | None = None,
        **options: Unpack[SpeechOptions],
    ) -> SpeechStream:
        """Speak `text` and give audio while it is being made. The call begins with the first chunk that is asked for."""
        call = calls.stream(text, voice, encoding, options)
        return SpeechStream(lambda: self._begin(call, timeout_s), self.address)

    def voices(self, model: str = "", *, timeout_s: float | None = SHORT_TIMEOUT_S) -> list[Voice]:
        """The voices of a pipeline, or of all of them, sorted by model and name."""
        return self._call(calls.voices(model), timeout_s)

    def server(self, *, timeout_s: float | None = SHORT_TIMEOUT_S) -> Server:
        """Version and uptime of the server."""
        return self._call(calls.server(), timeout_s)

    def pipelines(self, *, timeout_s: float | None = SHORT_TIMEOUT_S) -> list[Pipeline]:
        """The configured pipelines, their limits, and whether each can serve now."""
        return self._call(calls.pipelines(), timeout_s)

    def stages(self, *, timeout_s: float | None = SHORT_TIMEOUT_S) -> list[Stage]:
        """The configured stages with their replicas, states and load."""
        return self._call(calls.stages(), timeout_s)

    def health(self, service: str = "", *, timeout_s: float | None = SHORT_TIMEOUT_S) -> str:
        """State of a service by grpc.health.v1: "SERVING" or "NOT_SERVING"; "" is the process. RemoteError if unknown."""
        return self._call(calls.health(service), timeout_s)

    def _open(self) -> grpc.Channel:
        forks.check()
        self._leave_inherited()
        if self._channel is None:
            self._pid = os.getpid()
            self._channel = grpc.insecure_channel(self.address, options=open_options(self.address))
        return self._channel

    def _leave_inherited(self) -> None:
        """In a forked child: forget the channel of the parent, but keep it."""
        if self._channel is not None and self._pid != os.getpid():
            self._inherited.append(self._channel)
            self._channel = None

    def _call(self, call: UnaryCall[R, T], timeout_s: float | None) -> T:
        method = self._open().unary_unary(
            call.path,
            request_serializer=type(call.request).SerializeToString,
            response_deserializer=call.response.FromString,
        )
        # A future, as its waits have an end of their own and can be interrupted.
        future = method.future(call.request, timeout=timeout_s)
        forks.begin(future)
        try:
            response = future.result(None if timeout_s is None else timeout_s + _LATE_S)
        except grpc.FutureTimeoutError:
            raise deadline_passed(self.address) from None
        except grpc.RpcError as failure:
            raise error_of(failure, self.address) from failure
        except BaseException:
            future.cancel()
            raise
        finally:
            forks.end(future)
        return call.convert(response)

    def _begin(self, call: StreamCall, timeout_s: float | None) -> _Responses:
        method = self._open().unary_stream(
            call.path,
            request_serializer=type(call.request).SerializeToString,
            response_deserializer=speech_pb2.StreamSynthesizeResponse.FromString,
        )
        responses: _Responses = method(call.request, timeout=timeout_s)
        forks.begin(responses)
        return responses


class SpeechStream(Iterator[AudioChunk]):
    """Chunks of a clip that is being made. Made by `Client.stream`; for one thread at a time.

    Iteration raises OmnistageError if the synthesis fails, after the chunks that came before; these are valid but incomplete.
    """

    def __init__(self, begin: Callable[[], _Responses], address: str) -> None:
        self._begin = begin
        self._address = address
        self._reader = SpeechReader()
        self._responses: _Responses | None = None
        self._ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> AudioChunk:
        if self._ended:
            raise StopIteration
        try:
            chunk = self._next()
        except OmnistageError as error:
            self._reader.error = error
            self.close()
            raise
        except BaseException:
            self.close()
            raise
        if chunk is None:
            self.close()
            raise StopIteration
        return chunk

    @property
    def started(self) -> SpeechStarted | None:
        """Head of the stream; None until the first chunk came."""
        return self._reader.started

    @property
    def result(self) -> SpeechResult:
        """Account of the synthesis. Raises the stream's error if it failed, RuntimeError if it was not read to its end."""
        return self._reader.result

    def close(self) -> None:
        """End the call; the server stops working on it. Without effect when it has ended."""
        self._ended = True
        if self._responses is not None:
            self._responses.cancel()
            forks.end(self._responses)

    def _next(self) -> AudioChunk | None:
        """The next chunk; None at the end."""
        try:
            if self._responses is None:
                self._responses = self._begin()
            for response in self._responses:
                chunk = self._reader.feed(response)
                if chunk is not None:
                    return chunk
        except grpc.RpcError as failure:
            raise error_of(failure, self._address) from failure
        self._reader.end()
        return None
