"""Settings of the codec engine: `stages.<name>.engine` in the settings file."""

from __future__ import annotations

from pydantic import Field

from stage_runtime.config import Settings


class CodecSettings(Settings):
    """How much the codec takes at once."""

    max_batch: int = Field(32, ge=1, le=1024, description="most windows decoded in one pass; one with batch_invariant")
    max_batch_frames: int = Field(
        1600,
        ge=1,
        description="most frames decoded in one pass, padding included: bounds its memory. A longer window is decoded by itself",
    )
    max_window_frames: int = Field(
        400, ge=1, le=4096, description="most frames of a request's window: a chunk and its left context"
    )
    max_sequences: int = Field(
        1024, ge=1, le=65_536, description="most requests at once; they hold no memory between steps"
    )
