"""The client for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar, Unpack, cast

import grpc
import grpc.aio
from google.protobuf.message import Message

from omnistage import calls, forks
from omnistage.calls import SHORT_TIMEOUT_S, SpeechOptions, StreamCall, UnaryCall
from omnistage.connection import DEFAULT_ADDRESS, check_address, error_of, open_options
from omnistage.encodings import Encoding
from omnistage.speech import AudioChunk, Clip, SpeechReader, SpeechResult, SpeechStarted, Voice
from omnistage.system import Pipeline, Server, Stage
from omnistage.v1 import speech_pb2
from stage_runtime.errors import OmnistageError

R = TypeVar("R", bound=Message)
T = TypeVar("T")

_Responses = grpc.aio.UnaryStreamCall[Message, speech_pb2.StreamSynthesizeResponse]


class _Connection(NamedTuple):
    channel: grpc.aio.Channel
    lifetime: AsyncGenerator[grpc.aio.Channel, None]


class AsyncClient:
    """Calls a server from coroutines; connects when it is first used, once in each event loop.

    It may be made anywhere, also when no loop runs, and used in one `asyncio.run` after another; a loop's connection is closed with
    it, or by `close`. Failures raise OmnistageError as those of Client do. Cancelling a task cancels the call that it waits for.
    """

    def __init__(self, address: str = DEFAULT_ADDRESS) -> None:
        """`address` is host:port, unix:/path/to/socket or dns:///name:port; raises ValueError if it is none of these."""
        self.address = check_address(address)
        self._connections: dict[asyncio.AbstractEventLoop, _Connection] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the running loop's connection; calls in flight are cancelled. The client connects anew if it is used again."""
        connection = self._connections.get(asyncio.get_running_loop())
        if connection is not None:
            await connection.lifetime.aclose()

    async def synthesize(
        self,
        text: str,
        *,
        voice: str,
        encoding: Encoding = "wav",
        timeout_s: float | None = None,
        **options: Unpack[SpeechOptions],
    ) -> Clip:
        """Speak `text` and return the whole clip."""
        return await self._call(calls.synthesize(text, voice, encoding, options), timeout_s)

    def stream(
        self,
        text: str,
        *,
        voice: str,
        encoding: Encoding = "pcm",
        timeout_s: float | None = None,
        **options: Unpack[SpeechOptions],
    ) -> AsyncSpeechStream:
        """Speak `text` and give audio while it is being made. The call begins with the first chunk that is asked for."""
        call = calls.stream(text, voice, encoding, options)
        return AsyncSpeechStream(lambda: self._begin(call, timeout_s), self.address)

    async def voices(self, model: str = "", *, timeout_s: float | None = SHORT_TIMEOUT_S) -> list[Voice]:
        """The voices of a pipeline, or of all of them, sorted by model and name."""
        return await self._call(calls.voices(model), timeout_s)

    async def server(self, *, timeout_s: float | None = SHORT_TIMEOUT_S) -> Server:
        """Version and uptime of the server."""
        return await self._call(calls.server(), timeout_s)

    async def pipelines(self, *, timeout_s: float | None = SHORT_TIMEOUT_S) -> list[Pipeline]:
        """The configured pipelines, their limits, and whether each can serve now."""
        return await self._call(calls.pipelines(), timeout_s)

    async def stages(self, *, timeout_s: float | None = SHORT_TIMEOUT_S) -> list[Stage]:
        """The configured stages with their replicas, states and load."""
        return await self._call(calls.stages(), timeout_s)

    async def health(self, service: str = "", *, timeout_s: float | None = SHORT_TIMEOUT_S) -> str:
        """State of a service by grpc.health.v1: "SERVING" or "NOT_SERVING"; "" is the process. RemoteError if unknown."""
        return await self._call(calls.health(service), timeout_s)

    async def _open(self) -> grpc.aio.Channel:
        """The running loop's channel."""
        forks.check()
        loop = asyncio.get_running_loop()
        if loop not in self._connections:
            for ended in [other for other in self._connections if other.is_closed()]:
                self._connections.pop(ended, None)
            lifetime = self._connect(loop)
            # does not wait for anything: no other task comes in between
            self._connections[loop] = _Connection(await anext(lifetime), lifetime)
        return self._connections[loop].channel

    async def _connect(self, loop: asyncio.AbstractEventLoop) -> AsyncGenerator[grpc.aio.Channel, None]:
        """A channel for as long as this generator lives; `asyncio.run` closes generators at its end, while channels still can be."""
        channel = grpc.aio.insecure_channel(self.address, options=open_options(self.address))
        forks.begin(channel)
        try:
            yield channel
        finally:
            self._connections.pop(loop, None)
            await channel.close()
            forks.end(channel)

    async def _call(self, call: UnaryCall[R, T], timeout_s: float | None) -> T:
        channel = await self._open()
        method: Any = channel.unary_unary(
            call.path,
            request_serializer=type(call.request).SerializeToString,
            response_deserializer=call.response.FromString,
        )
        try:
            response: R = await method(call.request, timeout=timeout_s)
        except grpc.aio.AioRpcError as failure:
            raise error_of(failure, self.address) from failure
        return call.convert(response)

    async def _begin(self, call: StreamCall, timeout_s: float | None) -> _Responses:
        channel = await self._open()
        method: Any = channel.unary_stream(
            call.path,
            request_serializer=type(call.request).SerializeToString,
            response_deserializer=speech_pb2.StreamSynthesizeResponse.FromString,
        )
        responses: _Responses = method(call.request, timeout=timeout_s)
        return responses


class AsyncSpeechStream(AsyncIterator[AudioChunk]):
    """Chunks of a clip that is being made. Made by `AsyncClient.stream`; for one task at a time.

    Iteration raises OmnistageError if the synthesis fails, after the chunks that came before; these are valid but incomplete.
    """

    def __init__(self, begin: Callable[[], Awaitable[_Responses]], address: str) -> None:
        self._begin = begin
        self._address = address
        self._reader = SpeechReader()
        self._responses: _Responses | None = None
        self._ended = False

    def __del__(self) -> None:
        # The loop keeps a call alive that nobody reads.
        if self._responses is not None:
            self._responses.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AudioChunk:
        if self._ended:
            raise StopAsyncIteration
        try:
            chunk = await self._next()
        except OmnistageError as error:
            self._reader.error = error
            await self.aclose()
            raise
        except BaseException:
            await self.aclose()
            raise
        if chunk is None:
            await self.aclose()
            raise StopAsyncIteration
        return chunk

    @property
    def started(self) -> SpeechStarted | None:
        """Head of the stream; None until the first chunk came."""
        return self._reader.started

    @property
    def result(self) -> SpeechResult:
        """Account of the synthesis. Raises the stream's error if it failed, RuntimeError if it was not read to its end."""
        return self._reader.result

    async def aclose(self) -> None:
        """End the call; the server stops working on it. Without effect when it has ended."""
        self._ended = True
        if self._responses is not None:
            self._responses.cancel()

    async def _next(self) -> AudioChunk | None:
        """The next chunk; None at the end."""
        try:
            if self._responses is None:
                self._responses = await self._begin()
            while (response := cast("Any", await self._responses.read())) is not grpc.aio.EOF:
                chunk = self._reader.feed(response)
                if chunk is not None:
                    return chunk
        except grpc.aio.AioRpcError as failure:
            raise error_of(failure, self._address) from failure
        self._reader.end()
        return None
