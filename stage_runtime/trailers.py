"""An error as the trailers of a gRPC call: code, message, google.rpc.Status and retry hint, small enough to arrive."""

from __future__ import annotations

import base64
from dataclasses import dataclass

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from stage_runtime.errors import OmnistageError

DETAILS_KEY = "grpc-status-details-bin"
PUSHBACK_KEY = "grpc-retry-pushback-ms"

# gRPC refuses metadata at random above its soft limit of 8 KiB, and always above 16 KiB; the client then sees
# RESOURCE_EXHAUSTED instead of our error.
MAX_TRAILER_BYTES = 7000
# What handlers may add to a failed call.
SPARE_TRAILER_BYTES = 800
_OVERHEAD_BYTES = 200
# Most bytes of each text, tried in this order until the whole fits.
_TEXT_BYTES = (1000, 500, 250, 120, 60)
_MAX_PUSHBACK_MS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Trailers:
    """What `grpc.aio.ServicerContext.abort` takes."""

    code: grpc.StatusCode
    message: str
    metadata: tuple[tuple[str, str | bytes], ...]


def from_error(error: OmnistageError) -> Trailers:
    """The trailers of an error; texts in it are cut if they would not fit into MAX_TRAILER_BYTES."""
    status = fit(error.to_status())
    metadata: list[tuple[str, str | bytes]] = [(DETAILS_KEY, status.SerializeToString())]
    if error.retry_after_s is not None:
        # Retries made by the gRPC library obey this and do not look at RetryInfo.
        pushback_ms = min(max(round(error.retry_after_s * 1000), 0), _MAX_PUSHBACK_MS)
        metadata.append((PUSHBACK_KEY, str(pushback_ms)))
    return Trailers(error.status_code, status.message, tuple(metadata))


def fit(status: status_pb2.Status, limit_bytes: int = MAX_TRAILER_BYTES) -> status_pb2.Status:
    """The status itself if it is small enough, else a copy whose texts are cut; code and reason always stay."""
    if size_bytes(status) <= limit_bytes:
        return status
    for text_bytes in _TEXT_BYTES:
        smaller = _shortened(status, text_bytes)
        if size_bytes(smaller) <= limit_bytes:
            return smaller
    # Hundreds of small entries: nothing that this project makes.
    return status_pb2.Status(code=status.code, message=_cut(status.message, _TEXT_BYTES[-1]))


def size_bytes(status: status_pb2.Status) -> int:
    """Bytes of a status in trailers: the message percent-encoded, and the whole in base64."""
    message = sum(1 if 0x20 <= byte < 0x7F and byte != 0x25 else 3 for byte in status.message.encode())
    return message + len(base64.b64encode(status.SerializeToString())) + _OVERHEAD_BYTES


def _shortened(status: status_pb2.Status, text_bytes: int) -> status_pb2.Status:
    result = status_pb2.Status(code=status.code, message=_cut(status.message, text_bytes))
    for packed in status.details:
        detail = _unpacked(packed)
        match detail:
            case error_details_pb2.ErrorInfo():
                for key, value in detail.metadata.items():
                    detail.metadata[key] = _cut(value, text_bytes)
            case error_details_pb2.BadRequest():
                del detail.field_violations[max(1, text_bytes // 50) :]
                for violation in detail.field_violations:
                    violation.field = _cut(violation.field, text_bytes)
                    violation.description = _cut(violation.description, text_bytes)
            case error_details_pb2.ResourceInfo():
                detail.resource_name = _cut(detail.resource_name, text_bytes)
                detail.description = _cut(detail.description, text_bytes)
            case error_details_pb2.RetryInfo():
                pass
            case _:
                continue  # of foreign making, and too large
        result.details.add().Pack(detail)
    return result


def _unpacked(packed: Any) -> Message | None:
    for kind in (
        error_details_pb2.ErrorInfo,
        error_details_pb2.BadRequest,
        error_details_pb2.ResourceInfo,
        error_details_pb2.RetryInfo,
    ):
        detail: Message = kind()
        if packed.Unpack(detail):
            return detail
    return None


def _cut(text: str, limit_bytes: int) -> str:
    raw = text.encode()
    return text if len(raw) <= limit_bytes else raw[: limit_bytes - 3].decode(errors="ignore") + "…"
