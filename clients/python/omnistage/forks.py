"""Guard against using gRPC in a process that was forked while gRPC was at work.

gRPC's fork handlers do nothing when a thread is inside of gRPC at that moment. Calls in the child then hang for ever, or damage its
memory, so that clients refuse them. Children that were forked between calls are fine.
"""

from __future__ import annotations

import os
import weakref

_at_work: weakref.WeakSet[object] = weakref.WeakSet()
_forked_at_work = False


def begin(work: object) -> None:
    """Say that gRPC is at work in threads of its own until `end(work)`, or until the object is gone."""
    _at_work.add(work)


def end(work: object) -> None:
    """Undo `begin`; without effect if that was done already."""
    _at_work.discard(work)


def check() -> None:
    """Raise RuntimeError if this process was forked while gRPC was at work."""
    if _forked_at_work:
        raise RuntimeError(
            "this process was forked while calls of an omnistage client were in flight, which gRPC does not survive; "
            "fork between calls (and after AsyncClient.close), or start the process with the method 'spawn'"
        )


def _after_fork() -> None:
    global _forked_at_work  # noqa: PLW0603 - a fact about the process
    _forked_at_work = _forked_at_work or len(_at_work) > 0


os.register_at_fork(after_in_child=_after_fork)
