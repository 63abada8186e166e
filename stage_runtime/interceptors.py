"""The one place where errors of handlers become gRPC statuses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing
from inspect import isasyncgenfunction
from typing import Any, Never, TypeAlias, cast

import grpc
import grpc.aio

from stage_runtime import logs, trailers
from stage_runtime.errors import InternalError, OmnistageError

_log = logs.get_logger(__name__)

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_Unary = Callable[[Any, "_Context"], Awaitable[Any]]

# Calls that belong to the infrastructure and set their statuses themselves.
UNTOUCHED = ("/grpc.health.", "/grpc.reflection.")

# A write fails a moment before grpc.aio cancels the handler because its client is gone.
_CLIENT_GONE_S = 1.0


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Maps what a handler raises, at once or in the middle of a stream, to the status of its call.

    - OmnistageError: its own code, message and details; with a retry delay also the trailer that gRPC's own retries obey.
    - ExceptionGroup (of a TaskGroup): the first OmnistageError in it.
    - anything else is a bug: INTERNAL with nothing but the request id; the traceback goes to the log.

    Cancellation passes, and so does what `context.abort` raised. Handlers are coroutines or asynchronous generators; a generator
    is closed before its call ends.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """Wrap the handler of one call."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(UNTOUCHED):
            return handler
        return _wrapped(handler, handler_call_details.method)


def _wrapped(handler: _Handler, method: str) -> _Handler:
    """The same handler with its errors mapped."""
    # What kinds of handler there are decides grpc; its types know nothing of asyncio.
    if handler.response_streaming:
        behavior: Any = handler.stream_stream if handler.request_streaming else handler.unary_stream
        make: Any = (
            grpc.stream_stream_rpc_method_handler if handler.request_streaming else grpc.unary_stream_rpc_method_handler
        )
        behavior = _writing(behavior) if isasyncgenfunction(behavior) else behavior
    else:
        behavior = handler.stream_unary if handler.request_streaming else handler.unary_unary
        make = (
            grpc.stream_unary_rpc_method_handler if handler.request_streaming else grpc.unary_unary_rpc_method_handler
        )
    guarded = _guarded(behavior, method)
    return cast("_Handler", make(guarded, handler.request_deserializer, handler.response_serializer))


def _writing(generate: Callable[[Any, _Context], AsyncIterator[Any]]) -> _Unary:
    """An asynchronous generator as a coroutine that writes; grpc.aio would leave closing it to the garbage collector."""

    async def write(request: Any, context: _Context) -> None:
        async with aclosing(cast("Any", generate(request, context))) as responses:
            async for response in responses:
                await context.write(response)

    return write


def _guarded(behavior: _Unary, method: str) -> _Unary:
    async def call(request: Any, context: _Context) -> Any:
        try:
            return await behavior(request, context)
        except asyncio.CancelledError as error:
            if _asked_to_cancel():
                raise
            # Nobody cancelled the call, so that grpc.aio would send nothing and the client would wait for ever.
            await _abort(error, method, context)
        except Exception as error:  # noqa: BLE001 - the seam where bugs become INTERNAL
            await _abort(error, method, context)

    return call


def _asked_to_cancel() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _abort(error: BaseException, method: str, context: _Context) -> Never:
    """End the call with the status of `error`; always raises."""
    if any(isinstance(leaf, grpc.aio.InternalError) for leaf in _leaves(error)):
        await asyncio.sleep(_CLIENT_GONE_S)  # most likely cancelled here
    mapped = _mapped(error, method)
    if isinstance(mapped, grpc.aio.AbortError):
        raise mapped  # the status is sent already
    request_id = logs.request_id.get()
    if request_id:
        mapped.with_request(request_id)
    _log.debug("call_failed", method=method, code=mapped.status_code, reason=mapped.reason)
    end = trailers.from_error(mapped)
    try:
        await context.abort(end.code, end.message, (*_own_trailers(context), *end.metadata))
    except grpc.aio.InternalError:
        # The client is gone: nobody is left to be told, and grpc.aio would log a traceback.
        raise asyncio.CancelledError from error


def _mapped(error: BaseException, method: str) -> OmnistageError | grpc.aio.AbortError:
    """The error that the client gets; what it does not get is logged with its traceback."""
    leaves = list(_leaves(error))
    wanted = next((leaf for leaf in leaves if isinstance(leaf, grpc.aio.AbortError)), None) or next(
        (leaf for leaf in leaves if isinstance(leaf, OmnistageError) and leaf.status_code is not grpc.StatusCode.OK),
        None,
    )
    bugs = [leaf for leaf in leaves if not isinstance(leaf, OmnistageError | grpc.aio.AbortError)]
    if wanted is None or bugs:
        _log.error("unexpected_error", method=method, exc_info=error)
    return InternalError(logs.request_id.get()) if wanted is None else wanted


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _leaves(each)
    else:
        yield error


def _own_trailers(context: _Context) -> tuple[tuple[str, str | bytes], ...]:
    """What the handler itself set, unless it is so much that the status might not arrive."""
    own = tuple((str(key), value) for key, value in context.trailing_metadata() or ())
    return own if sum(len(key) + len(value) + 32 for key, value in own) <= trailers.SPARE_TRAILER_BYTES else ()
