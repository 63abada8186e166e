"""Settings of the thinker engine: `stages.<name>.engine` in the settings file."""

from __future__ import annotations

from pydantic import Field

from stage_runtime.config import Settings


class ThinkerSettings(Settings):
    """How the thinker batches, and how much memory its key-value cache takes."""

    max_sequences: int = Field(32, ge=1, le=1024, description="most requests at once, if cache_bytes holds as many")
    max_positions: int = Field(
        4608, ge=16, le=2**20, description="most positions (prompt tokens plus frames) of one request"
    )
    cache_bytes: int = Field(
        2 * 2**30, ge=1, description="memory for the key-value cache; each request takes a slot of max_positions"
    )
    max_prefills_per_step: int = Field(
        1, ge=1, le=1024, description="prompts computed in one step; requests in progress wait that long for a step"
    )
    invariant_rows: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="with batch_invariant: row count of a decode pass; on a CPU its doubles too, as far as they give the same bits. "
        "Unset: 4 on a CPU, 32 on CUDA",
    )
