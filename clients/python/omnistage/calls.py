"""The calls that clients make: each as a request and what turns its answer into Python's own types. No input or output here."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypedDict, TypeVar

from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from omnistage import encodings, speech, system
from omnistage.encodings import Encoding
from omnistage.v1 import pipeline_pb2, speech_pb2
from stage_runtime.errors import FieldViolation, InvalidRequest

R = TypeVar("R", bound=Message)
T = TypeVar("T")

SHORT_TIMEOUT_S = 10.0
"""Default timeout of calls that only ask for facts."""

_SPEECH = speech_pb2.DESCRIPTOR.services_by_name["SpeechService"].full_name
_PIPELINE = pipeline_pb2.DESCRIPTOR.services_by_name["PipelineService"].full_name
_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


@dataclass(frozen=True, slots=True)
class UnaryCall(Generic[R, T]):
    """A call with one answer: method path, request, class of the answer, and what makes the result of it."""

    path: str
    request: Message
    response: type[R]
    convert: Callable[[R], T]


@dataclass(frozen=True, slots=True)
class StreamCall:
    """A synthesis stream."""

    path: str
    request: speech_pb2.StreamSynthesizeRequest


class SpeechOptions(TypedDict, total=False):
    """Optional parts of a speech request; None is the same as leaving one out. speech.proto has ranges and defaults.

    model: Name of the pipeline. seed: The same seed gives the same audio; without one the client draws it, and the result tells it.
    max_frames: Most frames of 80 ms. cfg_alpha: Strength of guidance. language_code: Checked against the voice's languages.
    client_request_id: Label for logs.
    """

    model: str | None
    seed: int | None
    max_frames: int | None
    cfg_alpha: float | None
    language_code: str | None
    client_request_id: str | None


def synthesize(
    text: str, voice: str, encoding: Encoding, options: SpeechOptions
) -> UnaryCall[speech_pb2.SynthesizeResponse, speech.Clip]:
    """SpeechService.Synthesize. Raises InvalidRequest if the request cannot even be written, TypeError for an unknown option."""
    request = speech_pb2.SynthesizeRequest(
        input=_speech_input(text, voice, options), encoding=encodings.to_proto(encoding)
    )
    return UnaryCall(f"/{_SPEECH}/Synthesize", request, speech_pb2.SynthesizeResponse, speech.clip)


def stream(text: str, voice: str, encoding: Encoding, options: SpeechOptions) -> StreamCall:
    """SpeechService.StreamSynthesize. Raises as `synthesize`."""
    request = speech_pb2.StreamSynthesizeRequest(
        input=_speech_input(text, voice, options), encoding=encodings.to_proto(encoding)
    )
    return StreamCall(f"/{_SPEECH}/StreamSynthesize", request)


def voices(model: str) -> UnaryCall[speech_pb2.ListVoicesResponse, list[speech.Voice]]:
    """SpeechService.ListVoices."""
    request = speech_pb2.ListVoicesRequest(model=model)
    return UnaryCall(f"/{_SPEECH}/ListVoices", request, speech_pb2.ListVoicesResponse, speech.voices)


def server() -> UnaryCall[pipeline_pb2.ListPipelinesResponse, system.Server]:
    """PipelineService.ListPipelines, for what it says of the server."""
    return _pipelines(system.server)


def pipelines() -> UnaryCall[pipeline_pb2.ListPipelinesResponse, list[system.Pipeline]]:
    """PipelineService.ListPipelines."""
    return _pipelines(system.pipelines)


def stages() -> UnaryCall[pipeline_pb2.ListStagesResponse, list[system.Stage]]:
    """PipelineService.ListStages."""
    path = f"/{_PIPELINE}/ListStages"
    return UnaryCall(path, pipeline_pb2.ListStagesRequest(), pipeline_pb2.ListStagesResponse, system.stages)


def health(service: str) -> UnaryCall[health_pb2.HealthCheckResponse, str]:
    """grpc.health.v1.Health.Check; gives the name of the state, such as "SERVING"."""
    request = health_pb2.HealthCheckRequest(service=service)
    return UnaryCall(f"/{_HEALTH}/Check", request, health_pb2.HealthCheckResponse, _health)


def _pipelines(
    convert: Callable[[pipeline_pb2.ListPipelinesResponse], T],
) -> UnaryCall[pipeline_pb2.ListPipelinesResponse, T]:
    path = f"/{_PIPELINE}/ListPipelines"
    return UnaryCall(path, pipeline_pb2.ListPipelinesRequest(), pipeline_pb2.ListPipelinesResponse, convert)


def _health(response: health_pb2.HealthCheckResponse) -> str:
    return health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)


def _speech_input(text: str, voice: str, options: SpeechOptions) -> speech_pb2.SpeechInput:
    unknown = options.keys() - SpeechOptions.__annotations__.keys()
    if unknown:
        known = ", ".join(SpeechOptions.__annotations__)
        raise TypeError(f"unknown options: {', '.join(sorted(unknown))}; there are: {known}")
    values: dict[str, object] = {"text": text, "voice": voice, **options}
    if values.get("seed") is None:
        # Drawn here, not in the server: should the call be tried again, it must not become another one.
        values["seed"] = secrets.randbits(63)
    request = speech_pb2.SpeechInput()
    violations = []
    for field, value in values.items():
        if value is None:
            continue
        try:
            # the names of the options are those of the fields
            setattr(request, field, value)
        except ValueError as error:
            # out of the field's range, or text that is not valid Unicode; all else is for the server to judge
            violations.append(FieldViolation(f"input.{field}", f"cannot be sent: {error}", "INVALID"))
    if violations:
        raise InvalidRequest(violations)
    return request
