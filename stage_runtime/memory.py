"""Telling an out-of-memory error from a bug, without importing torch."""

from __future__ import annotations

# torch's CPU allocator raises a plain RuntimeError; these are the only marks it has.
_CPU_ALLOCATOR_MARKS = ("can't allocate memory", "not enough memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory ran out: MemoryError, torch.OutOfMemoryError, or the CPU allocator's RuntimeError."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in _CPU_ALLOCATOR_MARKS)
