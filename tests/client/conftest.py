"""A server for the tests of the clients: it speaks the protos over real sockets and does what a test tells it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc.aio
import numpy as np
import pytest
from grpc_health.v1 import health_pb2_grpc

from omnistage import AsyncClient, AudioChunk, Client, SpeechResult
from omnistage.v1 import pipeline_pb2, pipeline_pb2_grpc, speech_pb2, speech_pb2_grpc
from services.router import audio
from stage_runtime.config import ServerSettings
from stage_runtime.grpc_options import server_options
from stage_runtime.health import HealthServicer
from stage_runtime.interceptors import ErrorInterceptor

T = TypeVar("T")
Context = grpc.aio.ServicerContext[Any, Any]

RATE_HZ = 24_000
CHUNK_SAMPLES = 1_920


@dataclass
class Behaviour:
    """What the server does with speech requests."""

    chunk_count: int = 3
    # raised by the first calls, one each, before anything else happens
    refusals: list[Exception] = field(default_factory=list)
    # code and message without details, as gRPC itself or a proxy sends them
    abort: tuple[grpc.StatusCode, str] | None = None
    trailers: tuple[tuple[str, str | bytes], ...] = ()
    # raised after the chunks
    error: Exception | None = None
    # waits for ever after the chunks
    hang: bool = False
    # the process "dies" after the chunks; with 0 chunks before it has answered anything
    die: bool = False
    # makes other messages of those that a good server sends
    alter: Callable[[list[speech_pb2.StreamSynthesizeResponse]], list[speech_pb2.StreamSynthesizeResponse]] | None = (
        None
    )
    # time that a chunk takes
    chunk_s: float = 0.0
    sent_chunk_count: int = 0


class FakeServer(speech_pb2_grpc.SpeechServiceServicer, pipeline_pb2_grpc.PipelineServiceServicer):
    """Router's public services on a thread of its own."""

    def __init__(self, listen: str) -> None:
        self.behaviour = Behaviour()
        self.inputs: list[speech_pb2.SpeechInput] = []
        self.call_counts: dict[str, int] = {}
        self.cancelled = threading.Event()
        self.health = HealthServicer(["omnistage.v1.SpeechService"])
        self.health.set("", serving=True)
        self.voices = [
            speech_pb2.Voice(name="amy", model="speech", language_codes=["en"]),
            speech_pb2.Voice(name="bob", model="speech"),
        ]
        self.port = 0
        self._listen = listen
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server: grpc.aio.Server | None = None

    @property
    def address(self) -> str:
        return self._listen.replace(":0", f":{self.port}") if self.port else self._listen

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=10)

    async def start(self) -> None:
        options = server_options(ServerSettings())
        self._server = grpc.aio.server(options=options, interceptors=[ErrorInterceptor()])
        speech_pb2_grpc.add_SpeechServiceServicer_to_server(self, self._server)
        pipeline_pb2_grpc.add_PipelineServiceServicer_to_server(self, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        port = self._server.add_insecure_port(self._listen)
        self.port = 0 if self._listen.startswith("unix:") else port
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)

    def close(self) -> None:
        self.run(self.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()

    async def _begin(self, method: str, context: Context) -> None:
        self.call_counts[method] = self.call_counts.get(method, 0) + 1
        behaviour = self.behaviour
        if behaviour.refusals:
            raise behaviour.refusals.pop(0)
        if behaviour.abort is not None:
            await context.abort(*behaviour.abort, behaviour.trailers)

    async def _end(self) -> None:
        """The part of a behaviour that comes after the chunks."""
        behaviour = self.behaviour
        if behaviour.error is not None:
            raise behaviour.error
        if behaviour.die:
            await asyncio.shield(asyncio.ensure_future(self.stop()))
        if behaviour.hang:
            await asyncio.Event().wait()

    @contextmanager
    def _noting_cancellation(self) -> Iterator[None]:
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.set()
            raise

    def samples(self) -> np.ndarray:
        """What the server says to everything: a tone, float32."""
        count = self.behaviour.chunk_count * CHUNK_SAMPLES
        return (0.5 * np.sin(np.arange(count) * 0.05)).astype("<f4")

    async def Synthesize(self, request, context):
        self.inputs.append(request.input)
        with self._noting_cancellation():
            await self._begin("Synthesize", context)
            await self._end()
        encoded = audio.encode(self.samples().tobytes(), request.encoding, RATE_HZ)
        return speech_pb2.SynthesizeResponse(
            audio=encoded, encoding=request.encoding, sample_rate_hz=RATE_HZ, result=self._result(request.input)
        )

    async def StreamSynthesize(self, request, context) -> AsyncIterator[speech_pb2.StreamSynthesizeResponse]:
        self.inputs.append(request.input)
        behaviour = self.behaviour
        with self._noting_cancellation():
            await self._begin("StreamSynthesize", context)
            if behaviour.die and not behaviour.chunk_count:
                await self._end()
            messages = self._messages(request)
            for message in behaviour.alter(messages) if behaviour.alter else messages:
                if message.HasField("finished"):
                    await self._end()
                if message.HasField("audio"):
                    await asyncio.sleep(behaviour.chunk_s)
                    behaviour.sent_chunk_count += 1
                yield message

    def _messages(self, request) -> list[speech_pb2.StreamSynthesizeResponse]:
        head = speech_pb2.SpeechStarted(
            request_id="r-1",
            client_request_id=request.input.client_request_id,
            encoding=request.encoding,
            sample_rate_hz=RATE_HZ,
            seed=request.input.seed,
        )
        messages = [speech_pb2.StreamSynthesizeResponse(started=head)]
        for index, piece in enumerate(np.split(self.samples(), max(self.behaviour.chunk_count, 1))):
            if not len(piece):
                continue
            data = audio.encode_chunk(piece.tobytes(), request.encoding, RATE_HZ, first=index == 0)
            chunk = speech_pb2.AudioChunk(audio=data, sample_offset=index * CHUNK_SAMPLES, sample_count=CHUNK_SAMPLES)
            messages.append(speech_pb2.StreamSynthesizeResponse(audio=chunk))
        messages.append(speech_pb2.StreamSynthesizeResponse(finished=self._result(request.input)))
        return messages

    def _result(self, request: speech_pb2.SpeechInput) -> speech_pb2.SpeechResult:
        result = speech_pb2.SpeechResult(
            request_id="r-1",
            client_request_id=request.client_request_id,
            model=request.model or "speech",
            voice=request.voice,
            seed=request.seed,
            stop_reason=speech_pb2.STOP_REASON_END_OF_AUDIO,
            usage=speech_pb2.SpeechUsage(
                text_token_count=2,
                prompt_token_count=9,
                frame_count=self.behaviour.chunk_count,
                sample_count=self.behaviour.chunk_count * CHUNK_SAMPLES,
            ),
        )
        result.timings.queue.FromMilliseconds(1)
        result.timings.first_audio.FromMilliseconds(20)
        result.timings.total.FromMilliseconds(300)
        return result

    async def ListVoices(self, request, context):
        await self._begin("ListVoices", context)
        voices = [voice for voice in self.voices if request.model in {"", voice.model}]
        return speech_pb2.ListVoicesResponse(voices=voices)

    async def ListPipelines(self, request, context):
        await self._begin("ListPipelines", context)
        pipeline = pipeline_pb2.Pipeline(
            name="speech",
            kind="speech",
            service="omnistage.v1.SpeechService",
            serving=True,
            stages=[pipeline_pb2.PipelineStage(role="codec", stage="codec-a", up_count=1)],
            in_flight_count=3,
            queued_count=4,
            finished_counts={"OK": 12, "CANCELLED": 1},
            limits=pipeline_pb2.PipelineLimits(
                max_concurrent_count=64, max_queued_count=256, max_text_characters=4096, max_frames=2048
            ),
        )
        response = pipeline_pb2.ListPipelinesResponse(pipelines=[pipeline], server_version="9.8.7")
        response.uptime.FromSeconds(3700)
        return response

    async def ListStages(self, request, context):
        await self._begin("ListStages", context)
        load = pipeline_pb2.ReplicaLoad(
            step_count=10, row_count=25, queued_count=1, active_count=2, capacity_count=32, aborted_count=5
        )
        load.busy.FromMilliseconds(1500)
        up = pipeline_pb2.Replica(
            address="[::1]:50063",
            state=pipeline_pb2.REPLICA_STATE_UP,
            model="tiny",
            model_fingerprint="abc",
            in_flight_count=2,
            load=load,
            lost_count=1,
        )
        lost = pipeline_pb2.Replica(
            address="127.0.0.1:50064", state=pipeline_pb2.REPLICA_STATE_LOST, reason="connection [red]refused[/red]"
        )
        stages = [
            pipeline_pb2.Stage(name="codec-a", kind="voxtral.codec", replicas=[up, lost]),
            pipeline_pb2.Stage(name="codec-b", kind="voxtral.codec"),
        ]
        return pipeline_pb2.ListStagesResponse(stages=stages)


StartServer = Callable[..., FakeServer]


@pytest.fixture
def start_server() -> Iterator[StartServer]:
    """A function that starts a server, at a free port unless it is told where."""
    started: list[FakeServer] = []

    def start(listen: str = "127.0.0.1:0") -> FakeServer:
        server = FakeServer(listen)
        started.append(server)
        server.run(server.start())
        return server

    yield start
    for server in started:
        server.close()


@pytest.fixture
def server(start_server: StartServer) -> FakeServer:
    """A server at a free port."""
    return start_server()


class SyncDriver:
    """Client."""

    def __init__(self, address: str) -> None:
        self.client = Client(address)

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """The result of a method; of "stream", what is there at its end."""
        if method == "stream":
            return self.stream([], *arguments, **options)
        return getattr(self.client, method)(*arguments, **options)

    def stream(self, chunks: list[AudioChunk], *arguments: Any, **options: Any) -> SpeechResult:
        """Put the chunks into `chunks` as they come."""
        with self.client.stream(*arguments, **options) as stream:
            for chunk in stream:
                chunks.append(chunk)  # noqa: PERF402 - what came must stay there if the next fails
            return stream.result

    def close(self) -> None:
        self.client.close()


class AsyncDriver:
    """AsyncClient, every use in an event loop of its own."""

    def __init__(self, address: str) -> None:
        self.client = AsyncClient(address)

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """The result of a method; of "stream", what is there at its end."""
        if method == "stream":
            return self.stream([], *arguments, **options)

        async def call() -> Any:
            return await getattr(self.client, method)(*arguments, **options)

        return asyncio.run(call())

    def stream(self, chunks: list[AudioChunk], *arguments: Any, **options: Any) -> SpeechResult:
        """Put the chunks into `chunks` as they come."""

        async def read() -> SpeechResult:
            async with self.client.stream(*arguments, **options) as stream:
                async for chunk in stream:
                    chunks.append(chunk)  # noqa: PERF401 - what came must stay there if the next fails
                return stream.result

        return asyncio.run(read())

    def close(self) -> None:
        """Its connections ended with their loops."""


Driver = SyncDriver | AsyncDriver
Connect = Callable[[str], Driver]


@pytest.fixture(params=[SyncDriver, AsyncDriver], ids=["sync", "async"])
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """A function that makes a client, of either kind, for an address."""
    made: list[Driver] = []

    def make(address: str) -> Driver:
        made.append(request.param(address))
        return made[-1]

    yield make
    for driver in made:
        driver.close()


@pytest.fixture
def client(connect: Connect, server: FakeServer) -> Driver:
    """A client, of either kind, of `server`."""
    return connect(server.address)
