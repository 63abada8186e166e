"""Tensors on the wire: rows of several requests packed into one buffer, sliced by bytes.

Knows dtypes, shapes and numpy; knows nothing of torch (stage_runtime.torch_tensors does), engines or gRPC calls. Everything
that comes from a peer is checked here before it is used.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from omnistage.stage.v1 import stage_pb2
from stage_runtime.errors import StageProtocolError

Buffer = bytes | memoryview


class DType(enum.Enum):
    """Element type: (wire value, bytes for each element, numpy type string). bf16 is seen by numpy as uint16."""

    F32 = (stage_pb2.DATA_TYPE_F32, 4, "<f4")
    F16 = (stage_pb2.DATA_TYPE_F16, 2, "<f2")
    BF16 = (stage_pb2.DATA_TYPE_BF16, 2, "<u2")
    I32 = (stage_pb2.DATA_TYPE_I32, 4, "<i4")
    I64 = (stage_pb2.DATA_TYPE_I64, 8, "<i8")
    U8 = (stage_pb2.DATA_TYPE_U8, 1, "|u1")

    def __init__(self, wire: stage_pb2.DataType.ValueType, size: int, numpy_type: str) -> None:
        self.wire = wire
        self.size = size
        self.numpy_type = np.dtype(numpy_type)

    @classmethod
    def from_wire(cls, value: int) -> DType:
        """The type of a wire value; raises StageProtocolError if there is none."""
        try:
            return _BY_WIRE[value]
        except KeyError:
            raise StageProtocolError(f"data type {value} is unknown") from None


_BY_WIRE: dict[int, DType] = {dtype.wire: dtype for dtype in DType}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a tensor of a stage looks like; `ragged` means any number of rows for each request, else exactly one."""

    name: str
    dtype: DType
    row_shape: tuple[int, ...] = ()
    ragged: bool = False

    def to_proto(self) -> stage_pb2.TensorSpec:
        """This spec as a message."""
        return stage_pb2.TensorSpec(name=self.name, dtype=self.dtype.wire, row_shape=self.row_shape, ragged=self.ragged)

    @classmethod
    def from_proto(cls, message: stage_pb2.TensorSpec) -> TensorSpec:
        """The spec of a message; raises StageProtocolError for an unknown dtype."""
        return cls(message.name, DType.from_wire(message.dtype), tuple(message.row_shape), message.ragged)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one or more requests along axis 0.

    `row_counts` holds the number of rows of each request, or is None when each has one. `data` is row-major and
    little-endian: sum(row_counts) x prod(row_shape) x dtype.size bytes.
    """

    dtype: DType
    row_shape: tuple[int, ...]
    data: Buffer
    row_counts: tuple[int, ...] | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.row_shape) * self.dtype.size

    @property
    def row_count(self) -> int:
        """Rows in all."""
        return len(self.data) // self.row_bytes if self.row_bytes else 0

    def split(self) -> list[Rows]:
        """The rows of each request, as views of the same buffer."""
        view = memoryview(self.data)
        if self.row_counts is None:
            step = self.row_bytes
            return [Rows(self.dtype, self.row_shape, view[at : at + step]) for at in range(0, len(view), step)]
        ends = list(accumulate(count * self.row_bytes for count in self.row_counts))
        starts = [0, *ends[:-1]]
        return [
            Rows(self.dtype, self.row_shape, view[start:end], (count,))
            for start, end, count in zip(starts, ends, self.row_counts, strict=True)
        ]

    def take(self, places: Sequence[int], request_count: int) -> Rows:
        """The rows of some requests, by place, out of `request_count`."""
        if list(places) == list(range(request_count)):
            return self
        parts = self.split()
        counts = None if self.row_counts is None else tuple(self.row_counts[place] for place in places)
        return Rows(self.dtype, self.row_shape, b"".join(parts[place].data for place in places), counts)

    def numpy(self) -> npt.NDArray[np.generic]:
        """The elements as an array [rows, *row_shape] that shares the buffer (bf16 as uint16)."""
        return np.frombuffer(self.data, self.dtype.numpy_type).reshape(-1, *self.row_shape)

    def to_proto(self, name: str) -> stage_pb2.PackedTensor:
        """These rows as a message (copies the data)."""
        message = stage_pb2.PackedTensor()
        self.write_to(message, name)
        return message

    def write_to(self, message: stage_pb2.PackedTensor, name: str) -> None:
        """Fill an empty message (copies the data once)."""
        message.name = name
        message.dtype = self.dtype.wire
        message.row_shape.extend(self.row_shape)
        message.row_counts.extend(self.row_counts or ())
        message.data = self.data if isinstance(self.data, bytes) else bytes(self.data)


def rows_from_numpy(array: npt.NDArray[np.generic], *, row_counts: Sequence[int] | None = None) -> Rows:
    """Rows of an array [rows, ...] of one of the wire's types; raises ValueError for another type."""
    for dtype in (DType.F32, DType.F16, DType.I32, DType.I64, DType.U8):
        if dtype.numpy_type == array.dtype:
            counts = None if row_counts is None else tuple(row_counts)
            return Rows(dtype, array.shape[1:], np.ascontiguousarray(array).tobytes(), counts)
    raise ValueError(f"numpy type {array.dtype} has no wire type")


def concatenate(parts: Sequence[Rows]) -> Rows:
    """Rows of several requests as one buffer; one part for each request. Raises ValueError if dtype or shape differ."""
    first = parts[0]
    if any(part.dtype is not first.dtype or part.row_shape != first.row_shape for part in parts):
        raise ValueError("rows of different dtype or shape cannot be packed together")
    counts: tuple[int, ...] | None = None
    if any(part.row_counts is not None for part in parts):
        counts = tuple(part.row_count for part in parts)
    data = first.data if len(parts) == 1 else b"".join(part.data for part in parts)
    return Rows(first.dtype, first.row_shape, data, counts)


def rows_from_proto(message: stage_pb2.PackedTensor, request_count: int) -> Rows:
    """The rows of a message that carries `request_count` requests.

    Raises StageProtocolError if counts, shape and bytes do not fit each other.
    """
    dtype = DType.from_wire(message.dtype)
    shape = tuple(message.row_shape)
    counts = tuple(message.row_counts) or None
    if counts is not None and len(counts) != request_count:
        raise StageProtocolError(f"tensor {message.name!r} has {len(counts)} row counts for {request_count} requests")
    data = message.data
    expected = (request_count if counts is None else sum(counts)) * math.prod(shape) * dtype.size
    if len(data) != expected or math.prod(shape) == 0:
        raise StageProtocolError(
            f"tensor {message.name!r} has {len(data)} bytes where shape {list(shape)} and its row counts need {expected}"
        )
    return Rows(dtype, shape, data, counts)


def tensors_from_proto(messages: Iterable[stage_pb2.PackedTensor], request_count: int) -> dict[str, Rows]:
    """The tensors of a message by name; raises StageProtocolError if one is malformed or named twice."""
    tensors: dict[str, Rows] = {}
    for message in messages:
        if message.name in tensors:
            raise StageProtocolError(f"tensor {message.name!r} is there twice")
        tensors[message.name] = rows_from_proto(message, request_count)
    return tensors


def check_tensors(tensors: Mapping[str, Rows], specs: Sequence[TensorSpec]) -> None:
    """Check that exactly the tensors of `specs` are there in dtype and shape; raises StageProtocolError if not."""
    names = {spec.name for spec in specs}
    if tensors.keys() != names:
        raise StageProtocolError(f"tensors {sorted(tensors)} came where {sorted(names)} are needed")
    for spec in specs:
        rows = tensors[spec.name]
        if rows.dtype is not spec.dtype or rows.row_shape != spec.row_shape:
            raise StageProtocolError(
                f"tensor {spec.name!r} is {rows.dtype.name} {list(rows.row_shape)} "
                f"where {spec.dtype.name} {list(spec.row_shape)} is needed"
            )
        if not spec.ragged and rows.row_counts is not None and any(count != 1 for count in rows.row_counts):
            raise StageProtocolError(f"tensor {spec.name!r} must have exactly one row for each request")


def nonfinite_requests(rows: Rows, request_count: int) -> list[int]:
    """Indices of the requests that have a NaN or an infinity among their rows."""
    if rows.dtype not in _FLOAT_CHECKS or not len(rows.data):
        return []
    exponent = _FLOAT_CHECKS[rows.dtype]
    bits = np.frombuffer(rows.data, f"<u{rows.dtype.size}")
    bad = (bits & exponent) == exponent
    if not bad.any():
        return []
    counts = rows.row_counts or (1,) * request_count
    owner = np.repeat(np.arange(request_count), np.multiply(counts, math.prod(rows.row_shape)))
    return [int(index) for index in np.unique(owner[bad])]


# All exponent bits set: infinity or NaN.
_FLOAT_CHECKS = {DType.F32: np.uint32(0x7F800000), DType.F16: np.uint16(0x7C00), DType.BF16: np.uint16(0x7F80)}
