"""When audio leaves: the chunk plan of a speech request (specification of Voxtral TTS, section 8.1), as a pure function.

Frames already sent are counted, not derived from a modulus: no frame is lost when first_chunk_frames does not divide chunk_frames,
and none is sent twice when the end arrives without a new frame.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """Sizes in frames: of the chunks until `chunk_frames` were sent, of those after, and of a chunk's left context at most.

    Raises ValueError if a size is out of its range.
    """

    first_chunk_frames: int
    chunk_frames: int
    context_frames: int

    def __post_init__(self) -> None:
        if self.chunk_frames < 1:
            raise ValueError(f"chunk_frames is {self.chunk_frames}; it must be at least 1")
        if not 1 <= self.first_chunk_frames <= self.chunk_frames:
            raise ValueError(
                f"first_chunk_frames is {self.first_chunk_frames}; it must be 1 to chunk_frames, {self.chunk_frames}"
            )
        if self.context_frames < 0:
            raise ValueError(f"context_frames is {self.context_frames}; it must be at least 0")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A window for the codec: `new` frames whose audio is wanted, after `ctx` frames of left context."""

    ctx: int
    new: int


def plan_chunk(frames_so_far: int, sent: int, *, finished: bool, plan: ChunkPlan) -> Chunk | None:
    """The chunk that leaves now, or None: nothing does. Call again after each, until it is None.

    Chunks are short until `chunk_frames` were sent; the one that gets there is cut so that the long ones begin exactly there. At the
    end the rest leaves, whatever its size.

    Args:
        frames_so_far: Frames made, without an END_AUDIO frame.
        sent: Frames that left in chunks before.
        finished: Whether no more frames will come.
        plan: Sizes.

    Raises:
        ValueError: More frames were sent than made.
    """
    if not 0 <= sent <= frames_so_far:
        raise ValueError(f"{sent} frames were sent of {frames_so_far} made")
    size = plan.chunk_frames
    if sent < plan.chunk_frames:
        size = min(plan.first_chunk_frames, plan.chunk_frames - sent)
    new = min(size, frames_so_far - sent)
    if new == 0 or (new < size and not finished):
        return None
    return Chunk(ctx=min(sent, plan.context_frames), new=new)
