"""stage_runtime.server: two servers on one address (case C49), sockets, reflection (case C52), stopping."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import threading
import time
from pathlib import Path

import grpc
import grpc.aio
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from omnistage.stage.v1 import stage_pb2, stage_pb2_grpc
from omnistage.v1 import speech_pb2, speech_pb2_grpc
from stage_runtime.config import ConfigError, ServerSettings
from stage_runtime.health import HealthServicer
from stage_runtime.server import AddressInUse, open_server

STAGE = "omnistage.stage.v1.StageService"
SPEECH = "omnistage.v1.SpeechService"
HEALTH = "grpc.health.v1.Health"
REFLECTION = {"grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection"}


def register(server):
    stage_pb2_grpc.add_StageServiceServicer_to_server(stage_pb2_grpc.StageServiceServicer(), server)
    speech_pb2_grpc.add_SpeechServiceServicer_to_server(speech_pb2_grpc.SpeechServiceServicer(), server)
    return [STAGE, SPEECH]


async def serve_here(*listen, health=None, **settings):
    health = health or HealthServicer()
    health.set("", serving=True)
    return await open_server(listen, ServerSettings(**settings), register, health)


async def answers(address, timeout=5):
    """Whether a server answers there."""
    async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        response = await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout)
        return response.status == health_pb2.HealthCheckResponse.SERVING


def other_text(address):
    """The same socket in another spelling."""
    return address.replace("unix:", "unix://")


@pytest.mark.parametrize("where", ["tcp", "unix", "unix, spelt differently"])
async def test_a_second_server_on_a_taken_address_ends_with_a_clear_error(serve, start, socket_dir, where) -> None:
    """Exit code 2 within five seconds and a message with the address; the first still answers, also when asked anew."""
    _, (address,) = serve("127.0.0.1:0" if where == "tcp" else f"unix:{socket_dir}/a.sock")
    begin = time.monotonic()

    second = start("serve.py", other_text(address) if "spelt" in where else address)
    code = await asyncio.to_thread(second.wait, 10)

    assert code == 2
    assert time.monotonic() - begin < 5
    assert f"AddressInUse: address {address} is in use" in second.communicate()[1]
    assert await answers(address)


@pytest.mark.parametrize("where", ["127.0.0.1:{}", "localhost:{}", "0.0.0.0:{}", "[::]:{}"])
async def test_overlapping_tcp_addresses_are_refused_within_a_second(where: str) -> None:
    """Names and wildcards that include the taken address are refused as well."""
    first = await serve_here("127.0.0.1:0")
    port = first.addresses[0].rpartition(":")[2]
    begin = time.monotonic()

    with pytest.raises(AddressInUse) as caught:
        await serve_here(where.format(port))

    assert time.monotonic() - begin < 1
    assert where.format(port) in str(caught.value)
    await first.stop(0)


async def test_a_foreign_listener_keeps_its_port_and_its_socket(socket_dir: Path) -> None:
    """A process that knows nothing of our locks is respected; its socket file stays."""
    path = socket_dir / "a.sock"
    with socket.socket() as tcp, socket.socket(socket.AF_UNIX) as unix:
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        unix.bind(str(path))
        unix.listen()

        for address in (f"127.0.0.1:{tcp.getsockname()[1]}", f"unix:{path}"):
            with pytest.raises(AddressInUse):
                await serve_here(address)

        assert stat.S_ISSOCK(path.stat().st_mode)
        assert list(socket_dir.iterdir()) == [path]


async def test_nothing_stays_open_when_one_of_several_addresses_is_taken(socket_dir: Path, free_port) -> None:
    """The addresses that were free before are free after the failure."""
    taken = await serve_here("127.0.0.1:0")
    free = [f"unix:{socket_dir}/a.sock", f"127.0.0.1:{free_port()}"]

    with pytest.raises(AddressInUse):
        await serve_here(*free, taken.addresses[0])

    assert list(socket_dir.iterdir()) == []
    server = await serve_here(*free)
    assert [await answers(address) for address in server.addresses] == [True, True]
    await server.stop(0)
    await taken.stop(0)


@pytest.mark.parametrize("where", ["tcp", "unix"])
async def test_a_killed_server_can_be_started_again_at_once(serve, socket_dir, free_port, where) -> None:
    """After kill -9 the same address works, and the lock and socket that were left behind do no harm."""
    address = f"127.0.0.1:{free_port()}" if where == "tcp" else f"unix:{socket_dir}/a.sock"
    process, _ = serve(address)
    assert await answers(address)
    process.kill()
    process.wait()

    process, _ = serve(address)

    assert await answers(address)
    process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(process.wait, 10) == 0
    assert list(socket_dir.iterdir()) == []


async def test_of_many_that_start_at_once_exactly_one_gets_the_socket(socket_dir: Path) -> None:
    """A stale socket file does not let two servers race: one wins, the others are told, and the winner answers."""
    path = socket_dir / "a.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))

    outcomes = await asyncio.gather(*(serve_here(f"unix:{path}") for _ in range(8)), return_exceptions=True)

    servers = [each for each in outcomes if not isinstance(each, BaseException)]
    assert len(servers) == 1
    assert all(isinstance(each, AddressInUse) for each in outcomes if each is not servers[0])
    assert await answers(f"unix:{path}")
    await servers[0].stop(0)


async def test_a_file_that_is_no_socket_is_not_removed(socket_dir: Path) -> None:
    """Neither a file nor a link to one is touched."""
    file = socket_dir / "precious"
    file.write_text("content")
    (socket_dir / "link").symlink_to(file)

    for name in ("precious", "link"):
        with pytest.raises(ConfigError, match="is no socket"):
            await serve_here(f"unix:{socket_dir}/{name}")

    assert file.read_text() == "content"


async def test_a_path_of_120_bytes_is_refused_with_its_length() -> None:
    """gRPC alone would only write to stderr, and clients would see UNKNOWN."""  # noqa: D403
    path = "/tmp/" + "x" * 115

    with pytest.raises(ConfigError, match="120 bytes; Unix sockets allow 107"):
        await serve_here(f"unix:{path}")


async def test_a_socket_is_for_its_owner_alone_from_the_start(socket_dir: Path) -> None:
    """Mode 0600 at every moment that the file exists; a missing folder is made for the owner alone."""
    path = socket_dir / "sub" / "a.sock"
    seen: set[int] = set()
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            try:
                seen.add(stat.S_IMODE(path.stat().st_mode))
            except FileNotFoundError:
                continue

    watcher = threading.Thread(target=look)
    watcher.start()
    umask = os.umask(0)
    try:
        for _ in range(20):
            server = await serve_here(f"unix:{path}")
            await server.stop(0)
    finally:
        os.umask(umask)
        done.set()
        watcher.join()

    assert seen <= {0o600}
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


async def test_the_socket_mode_is_a_setting(socket_dir: Path) -> None:
    """For a group, say; the process's umask is as before."""
    umask = os.umask(0o022)
    server = await serve_here(f"unix:{socket_dir}/a.sock", socket_mode=0o660)

    assert stat.S_IMODE((socket_dir / "a.sock").stat().st_mode) == 0o660
    assert os.umask(umask) == 0o022
    await server.stop(0)


async def test_several_addresses_are_served_with_the_ports_that_were_taken(socket_dir: Path) -> None:
    """Every address is listed in order and answers; a name is served on all its addresses under one port."""
    server = await serve_here("127.0.0.1:0", "localhost:0", f"unix:{socket_dir}/a.sock")

    first, second, third = server.addresses
    assert first.startswith("127.0.0.1:")
    assert second.startswith("localhost:")
    assert third == f"unix:{socket_dir}/a.sock"
    assert all([await answers(address) for address in server.addresses])
    for *_, place in socket.getaddrinfo("localhost", int(second.rpartition(":")[2]), type=socket.SOCK_STREAM):
        with socket.create_connection(place[:2], timeout=5):
            pass
    await server.stop(0)


async def test_no_address_is_an_error() -> None:
    """A server that nobody can reach is a fault in the settings."""
    with pytest.raises(ConfigError, match="no address"):
        await serve_here()


async def test_services_become_known_to_health() -> None:
    """Each registered service has a health of its own, NOT_SERVING until it is set."""
    health = HealthServicer()
    server = await serve_here("127.0.0.1:0", health=health)
    async with grpc.aio.insecure_channel(server.addresses[0]) as channel:
        response = await health_pb2_grpc.HealthStub(channel).List(health_pb2.HealthListRequest())

    assert set(response.statuses) == {"", STAGE, SPEECH}
    assert not health.serving(STAGE)
    await server.stop(0)


async def test_open_watch_streams_do_not_hold_up_the_stop() -> None:
    """With a grace period of 20 s and a client that watches the health, stopping takes no time; it may be done twice."""
    server = await serve_here("127.0.0.1:0")
    async with grpc.aio.insecure_channel(server.addresses[0]) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        begin = time.monotonic()

        await server.stop(20)

        assert time.monotonic() - begin < 2
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    await server.stop(20)
    await server.wait()


async def ask_reflection(channel, version, *requests):
    """Answers of one ServerReflectionInfo stream."""
    method = channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    return [response async for response in method(iter(requests), timeout=10)]


def by_symbol(name):
    return reflection_pb2.ServerReflectionRequest(file_containing_symbol=name)


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_lists_every_service_and_resolves_each(version: str) -> None:
    """The list is exactly what is served; the files of each symbol define it and load into an empty pool (case C52)."""
    server = await serve_here("127.0.0.1:0")
    async with grpc.aio.insecure_channel(server.addresses[0]) as channel:
        (listed,) = await ask_reflection(channel, version, reflection_pb2.ServerReflectionRequest(list_services="*"))
        names = [each.name for each in listed.list_services_response.service]
        answers = await ask_reflection(channel, version, *map(by_symbol, names))
    await server.stop(0)

    assert sorted(names) == sorted({STAGE, SPEECH, HEALTH, *REFLECTION})
    for name, answer in zip(names, answers, strict=True):
        assert not answer.HasField("error_response"), name
        pool = descriptor_pool.DescriptorPool()
        for raw in reversed(answer.file_descriptor_response.file_descriptor_proto):
            pool.Add(descriptor_pb2.FileDescriptorProto.FromString(raw))
        assert pool.FindServiceByName(name).methods


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_knows_messages_files_and_what_it_does_not_know(version: str) -> None:
    """Methods, messages of services and of error details are found, by symbol and by file; anything else is NOT_FOUND."""
    server = await serve_here("127.0.0.1:0")
    requests = [
        by_symbol("omnistage.v1.SpeechService.Synthesize"),
        by_symbol("omnistage.v1.SpeechInput"),
        by_symbol("google.rpc.ErrorInfo"),
        reflection_pb2.ServerReflectionRequest(file_by_filename=speech_pb2.DESCRIPTOR.name),
        reflection_pb2.ServerReflectionRequest(all_extension_numbers_of_type="omnistage.v1.SpeechInput"),
        by_symbol("omnistage.v1.SpeechService.Nonsense"),
        by_symbol("omnistage.v1.Nonsense"),
        reflection_pb2.ServerReflectionRequest(file_by_filename="nonsense.proto"),
        reflection_pb2.ServerReflectionRequest(),
    ]
    async with grpc.aio.insecure_channel(server.addresses[0]) as channel:
        found = await ask_reflection(channel, version, *requests)
    await server.stop(0)

    codes = [each.error_response.error_code for each in found]
    not_found, invalid = grpc.StatusCode.NOT_FOUND.value[0], grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert codes == [0, 0, 0, 0, 0, not_found, not_found, not_found, invalid]


async def test_reflection_can_be_switched_off() -> None:
    """Both versions are then UNIMPLEMENTED; everything else works."""
    server = await serve_here("127.0.0.1:0", reflection=False)
    async with grpc.aio.insecure_channel(server.addresses[0]) as channel:
        for version in ("v1", "v1alpha"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ask_reflection(channel, version, by_symbol(STAGE))
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert await answers(server.addresses[0])
    await server.stop(0)


async def test_a_misspelt_service_name_is_noticed_at_the_start() -> None:
    """Reflection would list it but could not describe it."""
    with pytest.raises(ValueError, match=r"omnistage\.v1\.SpechService"):
        await open_server(
            ["127.0.0.1:0"], ServerSettings(), lambda server: ["omnistage.v1.SpechService"], HealthServicer()
        )


async def test_errors_of_handlers_are_mapped() -> None:
    """The interceptor is in place: an unexpected exception does not reach the client."""

    class Broken(stage_pb2_grpc.StageServiceServicer):
        async def DescribeStage(self, request, context):
            raise RuntimeError("inner detail")

    def register_broken(server):
        stage_pb2_grpc.add_StageServiceServicer_to_server(Broken(), server)
        return [STAGE]

    server = await open_server(["127.0.0.1:0"], ServerSettings(), register_broken, HealthServicer())
    async with grpc.aio.insecure_channel(server.addresses[0]) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stage_pb2_grpc.StageServiceStub(channel).DescribeStage(stage_pb2.DescribeStageRequest())
    await server.stop(0)

    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "inner detail" not in caught.value.details()
