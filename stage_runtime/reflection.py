"""Server reflection, v1alpha and v1: grpcurl, Postman and their like list and describe our services without proto files.

grpcio-reflection serves v1alpha only. v1 has the same messages with the same numbers under another package name, so that the same
servicer answers both, and v1's description of itself is v1alpha's with the names replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.descriptor import FileDescriptor
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

V1ALPHA_NAME = reflection.SERVICE_NAME
V1_NAME = "grpc.reflection.v1.ServerReflection"


def add_reflection(server: grpc.aio.Server, service_names: Sequence[str]) -> None:
    """Serve reflection of `service_names` and of itself, in both versions.

    Raises:
        ValueError: A name is no service that the protos of this process define.
    """
    pools = _Pools(descriptor_pool.Default(), _v1_pool())
    names = (*service_names, V1ALPHA_NAME, V1_NAME)
    unknown = [name for name in names if not pools.has_service(name)]
    if unknown:
        raise ValueError(f"no proto of this process defines the services {unknown}")
    pool: Any = pools  # stands for a DescriptorPool
    servicer = reflection.aio.ReflectionServicer(names, pool=pool)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(V1_NAME, {"ServerReflectionInfo": handler}),))


class _Pools:
    """Two descriptor pools, asked one after the other; has the methods that ReflectionServicer calls."""

    def __init__(self, *pools: Any) -> None:
        self._pools = pools

    def has_service(self, name: str) -> bool:
        try:
            self._first(lambda pool: pool.FindServiceByName(name))
        except KeyError:
            return False
        return True

    def FindFileByName(self, name: str) -> FileDescriptor:  # noqa: N802
        found: FileDescriptor = self._first(lambda pool: pool.FindFileByName(name))
        return found

    def FindFileContainingSymbol(self, symbol: str) -> FileDescriptor:  # noqa: N802
        try:
            found: FileDescriptor = self._first(lambda pool: pool.FindFileContainingSymbol(symbol))
        except KeyError:
            # protobuf's pools do not count methods as symbols, but `grpcurl describe` asks for them
            found = self._first(lambda pool: pool.FindMethodByName(symbol)).containing_service.file
        return found

    def FindMessageTypeByName(self, name: str) -> Any:  # noqa: N802
        return self._first(lambda pool: pool.FindMessageTypeByName(name))

    def FindExtensionByNumber(self, message: Any, number: int) -> Any:  # noqa: N802
        return self._pools[0].FindExtensionByNumber(message, number)

    def FindAllExtensions(self, message: Any) -> Any:  # noqa: N802
        return self._pools[0].FindAllExtensions(message)

    def _first(self, find: Callable[[Any], Any]) -> Any:
        for pool in self._pools[:-1]:
            try:
                return find(pool)
            except KeyError:
                continue
        return find(self._pools[-1])


def _v1_pool() -> descriptor_pool.DescriptorPool:
    """A pool of its own, so that it cannot clash with a package that brings the real file."""
    file = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(file)
    file.name = file.name.replace("v1alpha", "v1")
    file.package = file.package.replace("v1alpha", "v1")
    for message in file.message_type:
        for field in message.field:
            if field.type_name:
                field.type_name = field.type_name.replace(".v1alpha.", ".v1.")
    for service in file.service:
        for method in service.method:
            method.input_type = method.input_type.replace(".v1alpha.", ".v1.")
            method.output_type = method.output_type.replace(".v1alpha.", ".v1.")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool
