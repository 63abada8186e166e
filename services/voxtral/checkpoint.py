"""Reading consolidated.safetensors: memory-mapped, each stage only the tensors it needs, everything checked first."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from services.voxtral.params import Shapes, VoxtralParams, expected_tensors, read_params
from stage_runtime.errors import CheckpointDamaged

WEIGHTS = "consolidated.safetensors"
ENCODER_PREFIXES = ("audio_tokenizer.input_proj.", "audio_tokenizer.encoder_blocks.")

# Two weights files that agree in header and in these samples are taken as equal; reading 8 GB at each start is not worth it.
_FINGERPRINT_SAMPLES = 64
_FINGERPRINT_SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened checkpoint directory whose tensors were found to fit its params.json.

    `skipped` names the tensors of the file that no stage reads, other than encoder weights and stored inv_freq; a stage warns of
    those under its own prefix.
    """

    directory: Path
    params: VoxtralParams
    fingerprint: str
    encoder_loaded: bool
    skipped: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of the model: that of its folder."""
        return self.directory.name

    def load(self, prefix: str, dtype: torch.dtype, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        """The tensors whose names begin with `prefix`, without it, as `dtype` on `device`.

        Raises CheckpointDamaged if the file can no longer be read.
        """
        wanted = [name for name in expected_tensors(self.params) if name.startswith(prefix)]
        with _open(self.directory / WEIGHTS) as file:
            return {name.removeprefix(prefix): file.get_tensor(name).to(device, dtype) for name in wanted}


def open_checkpoint(directory: Path | None) -> Checkpoint:
    """Open a checkpoint directory and check names and shapes of its tensors; reads no weights yet.

    Raises CheckpointDamaged, naming the file and what is wrong with it.
    """
    if directory is None or not directory.is_dir():
        raise CheckpointDamaged(
            str(directory), "is not a directory; set `model` of the stage to a checkpoint directory"
        )
    params = read_params(directory)
    weights = directory / WEIGHTS
    with _open(weights) as file:
        present = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  # no mapping
    expected = expected_tensors(params)
    _check(weights, present, expected)
    return Checkpoint(
        directory=directory,
        params=params,
        fingerprint=_fingerprint(directory),
        encoder_loaded=any(name.startswith(ENCODER_PREFIXES) for name in present),
        skipped=tuple(
            name
            for name in sorted(present.keys() - expected.keys())
            if not name.startswith(ENCODER_PREFIXES) and not name.endswith("inv_freq")
        ),
    )


def _check(weights: Path, present: Shapes, expected: Shapes) -> None:
    if missing := sorted(expected.keys() - present.keys()):
        raise CheckpointDamaged(str(weights), f"lacks {len(missing)} tensors, first {missing[0]}")
    for name, shape in expected.items():
        if present[name] != shape:
            raise CheckpointDamaged(
                str(weights), f"tensor {name} has shape {present[name]}; params.json asks for {shape}"
            )
    unknown = [
        name
        for name in present.keys() - expected.keys()
        if name.startswith("audio_tokenizer.") and not name.startswith(ENCODER_PREFIXES)
    ]
    if unknown:
        raise CheckpointDamaged(str(weights), f"has an unknown codec tensor {min(unknown)}")


@contextmanager
def _open(weights: Path) -> Iterator[safe_open]:
    try:
        with safe_open(weights, framework="pt") as file:
            yield file
    except FileNotFoundError:
        raise CheckpointDamaged(str(weights), "is missing") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointDamaged(str(weights), f"is damaged or truncated: {error}") from error


def _fingerprint(directory: Path) -> str:
    digest = hashlib.sha256()
    tree = json.loads((directory / "params.json").read_text())
    digest.update(json.dumps(tree, sort_keys=True).encode())
    weights = directory / WEIGHTS
    size = weights.stat().st_size
    with weights.open("rb") as file:
        (header_bytes,) = struct.unpack("<Q", file.read(8))
        digest.update(file.read(header_bytes))
        for index in range(_FINGERPRINT_SAMPLES):
            file.seek(8 + header_bytes + (size - 8 - header_bytes) * index // _FINGERPRINT_SAMPLES)
            digest.update(file.read(_FINGERPRINT_SAMPLE_BYTES))
    return digest.hexdigest()[:16]
