"""Preset voices: ready-made prompt rows, one file each (specification of Voxtral TTS, section 3.3).

Names come from the checkpoint's own lists; what a request names is only ever looked up among them.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError

FOLDER = "voice_embedding"

_LANGUAGE_PREFIX = re.compile(r"([a-z]{2})_")
_ENGLISH_PREFIXES = ("casual_", "cheerful_", "neutral_")

# What torch.load is known to raise for a file that is damaged or no tensor file.
_UNREADABLE = (OSError, EOFError, RuntimeError, ValueError, KeyError, pickle.UnpicklingError, SafetensorError)


class VoiceFault(Exception):
    """A voice cannot be used; the message is a predicate of its file, such as "voice_embedding/x.pt is missing"."""


@dataclass(frozen=True, slots=True)
class Voices:
    """Voices of a checkpoint. `rows` holds the usable ones, (N, D) in the run dtype; `faults` says what is wrong with each other."""

    rows: Mapping[str, torch.Tensor]
    faults: Mapping[str, str]


def load_voices(
    directory: Path, names: Iterable[str], row_counts: Mapping[str, int], dim: int, dtype: torch.dtype
) -> Voices:
    """Load every voice of `names`; one that tekken.json has no row count for, or whose file does not fit, becomes a fault.

    Args:
        directory: The checkpoint directory; files are voice_embedding/<name>.safetensors, else .pt.
        names: Names of all voices.
        row_counts: N of each voice according to tekken.json.
        dim: D of the language model.
        dtype: Run dtype.
    """
    usable: dict[str, torch.Tensor] = {}
    faults: dict[str, str] = {}
    for name in sorted(set(names)):
        try:
            if name not in row_counts:
                raise VoiceFault("tekken.json does not say how many rows it has")  # noqa: TRY301  # one place collects all
            usable[name] = _load(directory, name, row_counts[name], dim).to(dtype)
        except VoiceFault as fault:
            faults[name] = str(fault)
    return Voices(usable, faults)


def languages(name: str) -> list[str]:
    """Language that a voice's name tells: xx_... is xx, casual_, cheerful_ and neutral_ are English; else nothing."""
    if name.startswith(_ENGLISH_PREFIXES):
        return ["en"]
    match = _LANGUAGE_PREFIX.match(name)
    return [match[1]] if match else []


def _load(directory: Path, name: str, row_count: int, dim: int) -> torch.Tensor:
    if name in {"", ".", ".."} or any(char in name for char in "/\\\0"):
        raise VoiceFault("its name is not fit for a file name")
    file = directory / FOLDER / f"{name}.safetensors"
    if not file.is_file():
        file = file.with_name(f"{name}.pt")
    shown = f"{FOLDER}/{file.name}"
    if not file.is_file():
        raise VoiceFault(f"{shown} is missing")
    rows = _read(file, shown)
    if rows.shape != (row_count, dim):
        raise VoiceFault(
            f"{shown} has shape {list(rows.shape)}; tekken.json and params.json ask for {[row_count, dim]}"
        )
    if not rows.is_floating_point() or not bool(rows.isfinite().all()):
        raise VoiceFault(f"{shown} must hold finite floating-point numbers")
    return rows


def _read(file: Path, shown: str) -> torch.Tensor:
    try:
        if file.suffix == ".safetensors":
            tensors = list(safetensors.torch.load_file(file).values())
        else:
            tensors = [torch.load(file, map_location="cpu", weights_only=True)]
    except _UNREADABLE as error:
        raise VoiceFault(f"{shown} cannot be read: {str(error).partition(chr(10))[0][:200]}") from error
    if len(tensors) != 1 or not isinstance(tensors[0], torch.Tensor):
        raise VoiceFault(f"{shown} must hold exactly one tensor")
    return tensors[0]
