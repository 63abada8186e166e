"""Every error that can leave an Omnistage process, with its gRPC code; servers raise them, clients raise the same classes.

OmnistageError
├── InvalidRequest            INVALID_ARGUMENT     INVALID_REQUEST        every faulty field at once
├── UnknownVoice              NOT_FOUND            VOICE_NOT_FOUND
├── UnknownModel              NOT_FOUND            MODEL_NOT_FOUND
├── RequestIdInUse            ALREADY_EXISTS       REQUEST_ID_IN_USE
├── QueueFull                 RESOURCE_EXHAUSTED   QUEUE_FULL             retry later
├── StageOutOfMemory          RESOURCE_EXHAUSTED   STAGE_OUT_OF_MEMORY
├── StageUnavailable          UNAVAILABLE          STAGE_UNAVAILABLE      retry later
├── StageReplicaLost          UNAVAILABLE          STAGE_REPLICA_LOST     retry later
├── StageLoading              UNAVAILABLE          STAGE_LOADING          retry later
├── Draining                  UNAVAILABLE          DRAINING               retry later, elsewhere
├── StageAsleep               FAILED_PRECONDITION  STAGE_ASLEEP
├── StageBusy                 FAILED_PRECONDITION  STAGE_BUSY
├── ProtocolMismatch          FAILED_PRECONDITION  PROTOCOL_MISMATCH
├── StageProtocolError        INTERNAL             STAGE_PROTOCOL_ERROR   a peer broke the stage protocol
├── NonFiniteOutput           INTERNAL             NON_FINITE_OUTPUT
├── InternalError             INTERNAL             INTERNAL               a bug; details are in the server's log
├── CheckpointDamaged         DATA_LOSS            CHECKPOINT_DAMAGED
├── DeadlineExceeded          DEADLINE_EXCEEDED    DEADLINE_EXCEEDED
├── ClientStalled             DEADLINE_EXCEEDED    CLIENT_STALLED
├── Cancelled                 CANCELLED            CANCELLED
└── RemoteError               (any)                (none)                 a status without our ErrorInfo, such as gRPC's own

The form follows AIP-193: google.rpc.Status with exactly one ErrorInfo, whose metadata holds every variable of the message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self, TypeVar

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

_M = TypeVar("_M", bound=Message)

DOMAIN = "omnistage"

# A status travels in trailers, twice; over 16 KiB gRPC replaces it by an error of its own.
MAX_MESSAGE_CHARACTERS = 1500
MAX_METADATA_CHARACTERS = 300
MAX_VIOLATIONS = 20
MAX_LISTED_NAMES = 30


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One faulty field of a request: `field` is its path in proto names, `reason` an UPPER_SNAKE word."""

    field: str
    description: str
    reason: str


class OmnistageError(Exception):
    """An error with a gRPC code and a stable reason. Raise its subclasses."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN
    reason: ClassVar[str] = ""
    http_status: ClassVar[int] = 500

    def __init__(
        self,
        message: str,
        *,
        metadata: Mapping[str, str] | None = None,
        retry_after_s: float | None = None,
        violations: Sequence[FieldViolation] = (),
        resource: tuple[str, str] | None = None,
    ) -> None:
        """`metadata` keys are lowerCamelCase; `resource` is (type, name) of a thing that was not found."""
        self.message = _cut(message, MAX_MESSAGE_CHARACTERS)
        self.metadata = {key: _cut(value, MAX_METADATA_CHARACTERS) for key, value in (metadata or {}).items()}
        self.retry_after_s = retry_after_s
        self.violations = tuple(violations)[:MAX_VIOLATIONS]
        self.resource = resource
        super().__init__(self.message)

    @property
    def request_id(self) -> str:
        """The server's id of the request that failed, or empty."""
        return self.metadata.get("requestId", "")

    @property
    def stage(self) -> str:
        """Name of the stage that failed, or empty."""
        return self.metadata.get("stage", "")

    @property
    def replica(self) -> str:
        """Address of the replica that failed, or empty."""
        return self.metadata.get("replica", "")

    @property
    def status_code(self) -> grpc.StatusCode:
        """The gRPC code of this error."""
        return self.code

    def with_request(self, request_id: str) -> Self:
        """Name the request that failed, unless it is named already. Returns self."""
        self.metadata.setdefault("requestId", request_id)
        return self

    def at_stage(self, stage: str, replica: str) -> Self:
        """Name the stage and replica that failed, unless they are named already. Returns self."""
        self.metadata.setdefault("stage", stage)
        self.metadata.setdefault("replica", replica)
        return self

    def to_status(self) -> status_pb2.Status:
        """This error as google.rpc.Status."""
        status = status_pb2.Status(code=self.status_code.value[0], message=self.message)
        for detail in self._details():
            status.details.add().Pack(detail)
        return status

    def _details(self) -> Iterator[Message]:
        if self.reason:
            yield error_details_pb2.ErrorInfo(reason=self.reason, domain=DOMAIN, metadata=self.metadata)
        if self.violations:
            yield error_details_pb2.BadRequest(
                field_violations=[
                    error_details_pb2.BadRequest.FieldViolation(
                        field=violation.field, description=violation.description, reason=violation.reason
                    )
                    for violation in self.violations
                ]
            )
        if self.retry_after_s is not None:
            delay = Duration()
            delay.FromMilliseconds(round(self.retry_after_s * 1000))
            yield error_details_pb2.RetryInfo(retry_delay=delay)
        if self.resource is not None:
            kind, name = self.resource
            yield error_details_pb2.ResourceInfo(resource_type=kind, resource_name=_cut(name, MAX_METADATA_CHARACTERS))


class InvalidRequest(OmnistageError):
    """One or more fields of the request are faulty; all of them are listed."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "INVALID_REQUEST"
    http_status = 400

    def __init__(self, violations: Sequence[FieldViolation]) -> None:
        """Raises ValueError if there is no violation."""
        if not violations:
            raise ValueError("an InvalidRequest needs at least one violation")
        text = "; ".join(f"{violation.field}: {violation.description}" for violation in violations)
        super().__init__(text, violations=violations, metadata={"fields": ",".join(v.field for v in violations)})


class UnknownVoice(OmnistageError):
    """No voice of that name; the message lists the valid ones, capped."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "VOICE_NOT_FOUND"
    http_status = 404

    def __init__(self, voice: str, valid: Iterable[str], *, model: str = "") -> None:
        names = list_names(valid)
        super().__init__(
            f"voice {_cut(voice, 80)!r} does not exist; valid voices: {names}",
            metadata={"voice": voice, "model": model, "validVoices": names},
            resource=("voice", voice),
        )


class UnknownModel(OmnistageError):
    """No pipeline of that name; the message lists the valid ones, capped."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "MODEL_NOT_FOUND"
    http_status = 404

    def __init__(self, model: str, valid: Iterable[str]) -> None:
        names = list_names(valid)
        super().__init__(
            f"model {_cut(model, 80)!r} does not exist; valid models: {names}",
            metadata={"model": model, "validModels": names},
            resource=("model", model),
        )


class RequestIdInUse(OmnistageError):
    """Another request with the same client_request_id is in flight."""

    code = grpc.StatusCode.ALREADY_EXISTS
    reason = "REQUEST_ID_IN_USE"
    http_status = 409

    def __init__(self, client_request_id: str) -> None:
        super().__init__(
            f"client_request_id {client_request_id!r} is in use by a request in flight; use another, or none",
            metadata={"clientRequestId": client_request_id},
        )


class QueueFull(OmnistageError):
    """A bounded queue is full; nothing was started."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "QUEUE_FULL"
    http_status = 429

    def __init__(self, where: str, limit: int, *, retry_after_s: float) -> None:
        super().__init__(
            f"the queue of {where} is full ({limit} requests are waiting); try again in {retry_after_s:g} s",
            metadata={"queue": where, "limit": str(limit)},
            retry_after_s=retry_after_s,
        )


class StageOutOfMemory(OmnistageError):
    """The stage has not enough memory for this request even alone."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "STAGE_OUT_OF_MEMORY"
    http_status = 429

    def __init__(self, detail: str) -> None:
        super().__init__(f"the stage ran out of memory for this request alone: {detail}", metadata={"detail": detail})


class StageUnavailable(OmnistageError):
    """No replica of a stage that the request needs takes requests."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "STAGE_UNAVAILABLE"
    http_status = 503

    def __init__(self, stage: str, detail: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(
            f"no replica of stage {stage!r} takes requests ({detail})",
            metadata={"stage": stage, "detail": detail},
            retry_after_s=retry_after_s,
        )


class StageReplicaLost(OmnistageError):
    """The replica that worked on the request died, hung or was cut off."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "STAGE_REPLICA_LOST"
    http_status = 503

    def __init__(self, stage: str, replica: str, detail: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(
            f"replica {replica} of stage {stage!r} was lost ({detail})",
            metadata={"stage": stage, "replica": replica, "detail": detail},
            retry_after_s=retry_after_s,
        )


class StageLoading(OmnistageError):
    """The stage is still loading its weights."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "STAGE_LOADING"
    http_status = 503

    def __init__(self, stage: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(
            f"stage {stage!r} is still loading its weights", metadata={"stage": stage}, retry_after_s=retry_after_s
        )


class Draining(OmnistageError):
    """The process is shutting down and takes no new requests, or did not finish this one within its grace period."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "DRAINING"
    http_status = 503

    def __init__(self, what: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(f"{what} is shutting down", metadata={"process": what}, retry_after_s=retry_after_s)


class StageAsleep(OmnistageError):
    """The stage was put to sleep and must be woken first."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "STAGE_ASLEEP"
    http_status = 400

    def __init__(self, stage: str) -> None:
        super().__init__(f"stage {stage!r} is asleep; call StageService/Wake first", metadata={"stage": stage})


class StageBusy(OmnistageError):
    """The stage cannot sleep while it has requests."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "STAGE_BUSY"
    http_status = 400

    def __init__(self, stage: str, active: int) -> None:
        super().__init__(
            f"stage {stage!r} has {active} requests; it can sleep only when idle",
            metadata={"stage": stage, "activeCount": str(active)},
        )


class ProtocolMismatch(OmnistageError):
    """Router and stage speak different major versions of the stage protocol."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "PROTOCOL_MISMATCH"
    http_status = 400

    def __init__(self, ours: str, theirs: str) -> None:
        super().__init__(
            f"this side speaks stage protocol {ours}, the peer {theirs}; run the same omnistage release on both",
            metadata={"ours": ours, "theirs": theirs},
        )


class StageProtocolError(OmnistageError):
    """A peer sent something that the stage protocol forbids."""

    code = grpc.StatusCode.INTERNAL
    reason = "STAGE_PROTOCOL_ERROR"
    http_status = 500

    def __init__(self, detail: str) -> None:
        super().__init__(f"the stage protocol was broken: {detail}", metadata={"detail": detail})


class NonFiniteOutput(OmnistageError):
    """The model computed NaN or infinity for this request."""

    code = grpc.StatusCode.INTERNAL
    reason = "NON_FINITE_OUTPUT"
    http_status = 500

    def __init__(self, tensor: str, step: int) -> None:
        super().__init__(
            f"step {step} gave NaN or infinity in {tensor!r}", metadata={"tensor": tensor, "step": str(step)}
        )


class InternalError(OmnistageError):
    """A bug. The traceback is in the log of the process, under the request id."""

    code = grpc.StatusCode.INTERNAL
    reason = "INTERNAL"
    http_status = 500

    def __init__(self, request_id: str = "") -> None:
        super().__init__(
            f"internal error; the server's log has the details under request id {request_id or '(none)'}",
            metadata={"requestId": request_id} if request_id else {},
        )


class CheckpointDamaged(OmnistageError):
    """A file of the checkpoint is missing, truncated, or does not fit the configuration."""

    code = grpc.StatusCode.DATA_LOSS
    reason = "CHECKPOINT_DAMAGED"
    http_status = 500

    def __init__(self, file: str, detail: str) -> None:
        super().__init__(f"{file}: {detail}", metadata={"file": file, "detail": detail})


class DeadlineExceeded(OmnistageError):
    """The client's deadline passed before the request ended."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    reason = "DEADLINE_EXCEEDED"
    http_status = 504

    def __init__(self, reached: str) -> None:
        super().__init__(f"the deadline passed while {reached}", metadata={"reached": reached})


class ClientStalled(OmnistageError):
    """The client read nothing from its stream for too long."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    reason = "CLIENT_STALLED"
    http_status = 504

    def __init__(self, stall_s: float) -> None:
        super().__init__(
            f"the client read nothing for {stall_s:g} s while audio was waiting",
            metadata={"stallSeconds": f"{stall_s:g}"},
        )


class Cancelled(OmnistageError):
    """The client cancelled the request."""

    code = grpc.StatusCode.CANCELLED
    reason = "CANCELLED"
    http_status = 499

    def __init__(self, detail: str = "the client cancelled the request") -> None:
        super().__init__(detail)


class RemoteError(OmnistageError):
    """A status that carries no ErrorInfo of ours: made by the gRPC library, a proxy, or a foreign server."""

    http_status = 502

    def __init__(self, status_code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self._status_code = status_code

    @property
    def status_code(self) -> grpc.StatusCode:
        """The gRPC code that was received."""
        return self._status_code


def all_errors() -> dict[str, type[OmnistageError]]:
    """Every error class by reason; RemoteError, which has none, is left out."""
    return {cls.reason: cls for cls in OmnistageError.__subclasses__() if cls.reason}


def from_status(status: status_pb2.Status) -> OmnistageError:
    """The error that `to_status` made; RemoteError if the status is not ours."""
    info = _detail(status, error_details_pb2.ErrorInfo)
    cls = all_errors().get(info.reason) if info is not None and info.domain == DOMAIN else None
    if info is None or cls is None:
        return RemoteError(_status_code(status.code), status.message)
    bad = _detail(status, error_details_pb2.BadRequest)
    retry = _detail(status, error_details_pb2.RetryInfo)
    resource = _detail(status, error_details_pb2.ResourceInfo)
    error = cls.__new__(cls)
    OmnistageError.__init__(
        error,
        status.message,
        metadata=dict(info.metadata),
        retry_after_s=retry.retry_delay.ToMilliseconds() / 1000 if retry is not None else None,
        violations=[FieldViolation(v.field, v.description, v.reason) for v in bad.field_violations] if bad else (),
        resource=(resource.resource_type, resource.resource_name) if resource is not None else None,
    )
    return error


def list_names(names: Iterable[str]) -> str:
    """Names as text, sorted and capped so that a status stays small; "(none)" if there are none."""
    ordered = sorted(names)
    shown = ", ".join(_cut(name, 60) for name in ordered[:MAX_LISTED_NAMES])
    hidden = len(ordered) - MAX_LISTED_NAMES
    return f"{shown} and {hidden} more" if hidden > 0 else shown or "(none)"


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _status_code(number: int) -> grpc.StatusCode:
    for code in grpc.StatusCode:
        if code.value[0] == number:
            return code
    return grpc.StatusCode.UNKNOWN


def _detail(status: status_pb2.Status, kind: type[_M]) -> _M | None:
    for packed in status.details:
        if packed.Is(kind.DESCRIPTOR):
            message = kind()
            packed.Unpack(message)
            return message
    return None
