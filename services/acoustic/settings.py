"""Settings of the acoustic engine: `stages.<name>.engine` in the settings file."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from stage_runtime.config import Settings

_Rows = Annotated[int, Field(ge=1, le=1024)]


class AcousticSettings(Settings):
    """How the acoustic stage batches."""

    max_batch: _Rows = Field(32, description="most frames computed in one forward pass")
    max_sequences: int | None = Field(
        None,
        ge=1,
        le=65_536,
        description="most requests at once; a step with more than max_batch is computed in parts; unset: max_batch",
    )
    invariant_rows: _Rows | None = Field(
        None,
        description="with batch_invariant: row count of a forward pass; on a CPU its doubles too, as far as they give the same bits. "
        "Unset: 4 on a CPU, 32 on CUDA, and never more than max_batch",
    )
    graphs: bool = Field(default=True, description="on CUDA: replay captured graphs; elsewhere without effect")
    graph_buckets: tuple[_Rows, ...] = Field(
        (1, 2, 4, 8, 16, 32),
        min_length=1,
        description="row counts that are captured; with batch_invariant the one row count takes their place",
    )

    @field_validator("graph_buckets")
    @classmethod
    def _sorted(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(value)) != len(value):
            raise ValueError("every bucket must be named once")
        return tuple(sorted(value))

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_sequences is not None and self.max_sequences < self.max_batch:
            raise ValueError(f"max_sequences ({self.max_sequences}) must not be below max_batch ({self.max_batch})")
        if self.invariant_rows is not None and self.invariant_rows > self.max_batch:
            raise ValueError(f"invariant_rows ({self.invariant_rows}) must not exceed max_batch ({self.max_batch})")
        return self

    @property
    def capacity(self) -> int:
        """Most requests at once."""
        return self.max_batch if self.max_sequences is None else self.max_sequences
