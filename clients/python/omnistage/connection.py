"""What both clients need of gRPC: addresses, channel arguments, and errors of calls as our error classes."""

from __future__ import annotations

import ipaddress
import json
import re
from typing import Final

import grpc
from google.protobuf.message import DecodeError
from google.rpc import status_pb2
from grpc_status import rpc_status

from omnistage.v1 import pipeline_pb2, speech_pb2
from stage_runtime.errors import DeadlineExceeded, OmnistageError, RemoteError, from_status
from stage_runtime.grpc_options import channel_options

DEFAULT_ADDRESS: Final = "localhost:50051"

# The longest clip, 4096 frames as float32, has 30 MiB.
MAX_MESSAGE_BYTES: Final = 64 * 2**20

# A server that was stopped or cut off is noticed within the sum. Our servers allow pings at every rate, also during silent calls.
KEEPALIVE_TIME_S: Final = 10.0
KEEPALIVE_TIMEOUT_S: Final = 10.0

# Schemes of gRPC target names that hold addresses of our servers; "dns:name:port" and "dns:///name:port" are both in use.
_SCHEMES: Final = ("dns:", "ipv4:", "ipv6:")
_HOST_PORT: Final = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%\w]+\]|[^\s:/\[\]]+):(?P<port>[0-9]{1,5})")


class ServerUnreachable(RemoteError):
    """No connection to the server, or it broke during the call; `address` is where it was looked for. Code UNAVAILABLE."""

    def __init__(self, address: str, detail: str) -> None:
        super().__init__(
            grpc.StatusCode.UNAVAILABLE,
            f"the server at {address} cannot be reached or went away; check the address and that a server runs there "
            f"(`omnistage up` starts one): {detail}",
        )
        self.address = address


def check_address(address: str) -> str:
    """Return `address` if it can be one of a server; raises ValueError, which tells the right forms, if not."""
    if address.startswith("unix:"):
        if address.removeprefix("unix:").strip("/"):
            return address
    elif all(map(_is_host_port, _places(address))):
        return address
    raise ValueError(
        f"server address {address!r} is none of host:port, [ipv6]:port, unix:/path/to/socket and dns:///name:port"
    )


def open_options(address: str) -> list[tuple[str, int | str]]:
    """Arguments of a channel to `address`.

    A call that fails with UNAVAILABLE before anything of its answer came is tried once more, after a short random delay or the one
    that the server asks for. A stream that began is thus never repeated, and a repeated synthesis has the same seed: calls.py sends
    one always.
    """
    return [
        *channel_options(
            MAX_MESSAGE_BYTES,
            keepalive_time_s=KEEPALIVE_TIME_S,
            keepalive_timeout_s=KEEPALIVE_TIMEOUT_S,
            # a forked child must not share the connection of its parent
            local_subchannel_pool=True,
            http_proxy=not _is_loopback(address),
        ),
        ("grpc.service_config", _SERVICE_CONFIG),
    ]


def error_of(failure: grpc.RpcError, address: str) -> OmnistageError:
    """The error of a call that failed: the class that the server raised, or what the gRPC library's status means.

    Without an ErrorInfo of ours: UNAVAILABLE is ServerUnreachable, DEADLINE_EXCEEDED is DeadlineExceeded (the library reports the
    passing of the call's own deadline so), anything else RemoteError.
    """
    if not isinstance(failure, grpc.Call | grpc.aio.AioRpcError):
        raise TypeError(f"{type(failure).__name__} tells no status") from failure
    status = _rich_status(failure)
    if status is not None:
        return from_status(status)
    code, details = failure.code(), failure.details() or ""
    if code is grpc.StatusCode.UNAVAILABLE:
        return ServerUnreachable(address, details)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return deadline_passed(address)
    return RemoteError(code, details)


def deadline_passed(address: str) -> DeadlineExceeded:
    """The error for a call whose deadline passed here, before the server said anything of it."""
    return DeadlineExceeded(f"waiting for the server at {address}")


def _rich_status(failure: grpc.Call | grpc.aio.AioRpcError) -> status_pb2.Status | None:
    try:
        # takes the errors of grpc.aio too; its type stubs do not know
        status: status_pb2.Status | None = rpc_status.from_call(failure)  # type: ignore[arg-type]
    except (ValueError, DecodeError):
        return None  # something on the way changed one of the two statuses; the plain one is gRPC's own
    return status


def _retry_policy() -> str:
    services = [
        module.DESCRIPTOR.services_by_name[name].full_name
        for module, name in ((speech_pb2, "SpeechService"), (pipeline_pb2, "PipelineService"))
    ]
    policy = {
        "maxAttempts": 2,
        "initialBackoff": "0.2s",
        "maxBackoff": "0.2s",
        "backoffMultiplier": 1,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    method = {"name": [{"service": service} for service in services], "retryPolicy": policy}
    return json.dumps({"methodConfig": [method]})


_SERVICE_CONFIG: Final = _retry_policy()


def _places(address: str) -> list[str]:
    """What an address has after its scheme, which it may be without, at its commas."""
    if address.startswith(_SCHEMES):
        return address.partition(":")[2].rpartition("/")[2].split(",")
    return [address]


def _is_host_port(text: str) -> bool:
    match = _HOST_PORT.fullmatch(text)
    return match is not None and 0 < int(match["port"]) < 2**16


def _is_loopback(address: str) -> bool:
    """Whether an address leads to this machine only."""
    if address.startswith("unix:"):
        return True
    return all(map(_is_loopback_host, (place.rpartition(":")[0].strip("[]") for place in _places(address))))


def _is_loopback_host(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
