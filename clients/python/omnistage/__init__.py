"""Python client of Omnistage.

Names are imported when they are first used: processes that need only the stubs, `omnistage.v1` and `omnistage.stage.v1`, load no
more than those.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omnistage.async_client import AsyncClient, AsyncSpeechStream
    from omnistage.client import Client, SpeechStream
    from omnistage.connection import ServerUnreachable
    from omnistage.encodings import Encoding
    from omnistage.speech import (
        AudioChunk,
        Clip,
        SpeechResult,
        SpeechStarted,
        SpeechTimings,
        SpeechUsage,
        Voice,
    )
    from omnistage.system import Pipeline, PipelineLimits, PipelineStage, Replica, ReplicaLoad, Server, Stage
    from stage_runtime.errors import (
        Cancelled,
        CheckpointDamaged,
        ClientStalled,
        DeadlineExceeded,
        Draining,
        FieldViolation,
        InternalError,
        InvalidRequest,
        NonFiniteOutput,
        OmnistageError,
        ProtocolMismatch,
        QueueFull,
        RemoteError,
        RequestIdInUse,
        StageAsleep,
        StageBusy,
        StageLoading,
        StageOutOfMemory,
        StageProtocolError,
        StageReplicaLost,
        StageUnavailable,
        UnknownModel,
        UnknownVoice,
    )
    from stage_runtime.version import VERSION

    __version__ = VERSION

__all__ = [
    "AsyncClient",
    "AsyncSpeechStream",
    "AudioChunk",
    "Cancelled",
    "CheckpointDamaged",
    "Client",
    "ClientStalled",
    "Clip",
    "DeadlineExceeded",
    "Draining",
    "Encoding",
    "FieldViolation",
    "InternalError",
    "InvalidRequest",
    "NonFiniteOutput",
    "OmnistageError",
    "Pipeline",
    "PipelineLimits",
    "PipelineStage",
    "ProtocolMismatch",
    "QueueFull",
    "RemoteError",
    "Replica",
    "ReplicaLoad",
    "RequestIdInUse",
    "Server",
    "ServerUnreachable",
    "SpeechResult",
    "SpeechStarted",
    "SpeechStream",
    "SpeechTimings",
    "SpeechUsage",
    "Stage",
    "StageAsleep",
    "StageBusy",
    "StageLoading",
    "StageOutOfMemory",
    "StageProtocolError",
    "StageReplicaLost",
    "StageUnavailable",
    "UnknownModel",
    "UnknownVoice",
    "Voice",
    "__version__",
]

# Where the names come from that are no error classes of the runtime.
_MODULES = {
    "omnistage.async_client": ("AsyncClient", "AsyncSpeechStream"),
    "omnistage.client": ("Client", "SpeechStream"),
    "omnistage.connection": ("ServerUnreachable",),
    "omnistage.encodings": ("Encoding",),
    "omnistage.speech": (
        "AudioChunk",
        "Clip",
        "SpeechResult",
        "SpeechStarted",
        "SpeechTimings",
        "SpeechUsage",
        "Voice",
    ),
    "omnistage.system": ("Pipeline", "PipelineLimits", "PipelineStage", "Replica", "ReplicaLoad", "Server", "Stage"),
}
_ORIGINS = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "__version__":
        value: Any = import_module("stage_runtime.version").VERSION
    else:
        value = vars(import_module(_ORIGINS.get(name, "stage_runtime.errors")))[name]
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
