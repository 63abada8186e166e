"""Windows of frames and how they are decoded together (specification of Voxtral TTS, section 7.6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence

from services.codec.model import CodecDecoder, left_reach_frames
from services.voxtral.params import END_AUDIO, SPECIAL_CODES, CodecParams

PIECE_FRAMES = 375
CONTEXT_FRAMES = 25

# Windows share a pass only as long as padding is at most this share of it: padding is computed like anything else.
MAX_PADDING = 0.25


@dataclass(frozen=True, slots=True)
class Window:
    """Frames to decode: `codes` (context + new, K) int64 with the shift of 2; the audio of the first `context` is dropped."""

    codes: torch.Tensor
    context: int


@dataclass(frozen=True, slots=True)
class Batching:
    """Which windows may share a pass. `alone`: none, so that the shape of a pass depends on one window only."""

    alone: bool = False
    max_windows: int = 32
    max_frames: int = 1600  # of a pass, padding included; a window longer than that is decoded by itself


@dataclass(frozen=True, slots=True)
class CodeFacts:
    """What was found in the codes of a request: frames before its END_AUDIO, and the first of them that no decoder can read."""

    frames: int
    bad_frame: int | None


def inspect_codes(requests: Sequence[torch.Tensor], params: CodecParams) -> list[CodeFacts]:
    """Look through the codes (T_i, K) of requests, all on one device; one copy to the host in all.

    What comes after END_AUDIO is not looked at: it is dropped.
    """
    found = []
    for codes in requests:
        ended = codes[:, 0] == END_AUDIO
        bad = ((codes < SPECIAL_CODES) | (codes >= _code_limits(params, codes.device))).any(dim=1)
        found.append(torch.stack([_first(ended), _first(bad)]))
    if not found:
        return []
    return [CodeFacts(end, bad if bad < end else None) for end, bad in torch.stack(found).tolist()]


def describe_bad_codes(codes: torch.Tensor, frame: int, params: CodecParams) -> str:
    """Say what is wrong with a frame that `inspect_codes` found fault with."""
    limits = _code_limits(params, torch.device("cpu")).tolist()
    for book, (code, limit) in enumerate(zip(codes[frame].tolist(), limits, strict=True)):
        if not SPECIAL_CODES <= code < limit:
            return (
                f"frame {frame} has code {code} in codebook {book}; real codes there are {SPECIAL_CODES} to {limit - 1}"
            )
    raise ValueError(f"frame {frame} has no bad code")


def decode_windows(decoder: CodecDecoder, windows: Sequence[Window], batching: Batching) -> list[torch.Tensor]:
    """Samples [new * samples_per_frame] float32 of each window, on the decoder's device."""
    per_frame = decoder.params.samples_per_frame
    waves: list[torch.Tensor] = [torch.empty(0, device=decoder.device)] * len(windows)
    for group in plan_passes([len(window.codes) for window in windows], batching):
        # Right padding leaves the valid part alone, as the decoder is causal; the padding code only has to be a real one.
        codes = pad_sequence([windows[at].codes for at in group], batch_first=True, padding_value=SPECIAL_CODES)
        for at, wave in zip(group, decoder(codes.to(decoder.device)), strict=True):
            waves[at] = wave[windows[at].context * per_frame : len(windows[at].codes) * per_frame]
    return waves


def plan_passes(lengths: Sequence[int], batching: Batching) -> list[list[int]]:
    """Which windows, by place, go into which pass. Longest first, so that padding within a pass is least; empty ones into none."""
    if batching.alone:
        return [[at] for at, length in enumerate(lengths) if length]
    passes: list[list[int]] = []
    useful = 0
    for at in sorted((at for at, length in enumerate(lengths) if length), key=lambda at: -lengths[at]):
        if passes:
            group = passes[-1]
            frames = lengths[group[0]] * (len(group) + 1)
            if (
                len(group) < batching.max_windows
                and frames <= batching.max_frames
                and frames - useful - lengths[at] <= MAX_PADDING * frames
            ):
                group.append(at)
                useful += lengths[at]
                continue
        passes.append([at])
        useful = lengths[at]
    return passes


@torch.inference_mode()
def decode_batch(
    decoder: CodecDecoder,
    requests: Sequence[torch.Tensor],
    *,
    context_frames: int | None = None,
    batching: Batching | None = None,
) -> list[torch.Tensor]:
    """Decode whole requests at once.

    Each is cut at its END_AUDIO and into pieces of 375 frames, of which the later ones get left context, so that no seam can be heard.

    Args:
        decoder: The decoder.
        requests: Codes (T_i, K) int64 with the shift of 2, all on one device; T_i may be 0.
        context_frames: Left context of the later pieces. Unset: 25, or the decoder's reach if that is more, which makes the result that
            of a decode in one piece. 0 decodes each piece as if it were a beginning.
        batching: Which pieces may share a pass.

    Returns:
        Samples [frames before END_AUDIO * samples_per_frame] float32 of each request, on the host, not clipped.

    Raises:
        ValueError: A frame before END_AUDIO has a code that is no real one.
    """
    params = decoder.params
    context = max(CONTEXT_FRAMES, left_reach_frames(params)) if context_frames is None else context_frames
    windows: list[Window] = []
    owners: list[int] = []
    for owner, (codes, facts) in enumerate(zip(requests, inspect_codes(requests, params), strict=True)):
        if facts.bad_frame is not None:
            raise ValueError(f"request {owner}: {describe_bad_codes(codes, facts.bad_frame, params)}")
        for start in range(0, facts.frames, PIECE_FRAMES):
            left = min(start, context)
            windows.append(Window(codes[start - left : min(facts.frames, start + PIECE_FRAMES)], left))
            owners.append(owner)
    pieces: list[list[torch.Tensor]] = [[torch.empty(0)] for _ in requests]
    for owner, wave in zip(owners, decode_windows(decoder, windows, batching or Batching()), strict=True):
        pieces[owner].append(wave.cpu())
    return [torch.cat(parts) for parts in pieces]


def _first(flags: torch.Tensor) -> torch.Tensor:
    """Place of the first true one of `flags` (T,), or T."""
    if not len(flags):
        return torch.zeros((), dtype=torch.int64, device=flags.device)
    return torch.where(flags.any(), flags.int().argmax(), len(flags))


def _code_limits(params: CodecParams, device: torch.device) -> torch.Tensor:
    """One more than the largest code of each codebook, (K,)."""
    limits = torch.full((1 + params.acoustic_dim,), params.acoustic_codebook_size + SPECIAL_CODES, device=device)
    limits[0] = params.semantic_codebook_size + SPECIAL_CODES
    return limits
