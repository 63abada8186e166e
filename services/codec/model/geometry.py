"""How far the decoder looks back, from its sizes alone (specification of Voxtral TTS, sections 7.3 and 7.5)."""

from __future__ import annotations

from services.voxtral.params import CodecParams


def attention_windows(params: CodecParams) -> tuple[int, ...]:
    """Window of each level in its own time steps: query i sees the keys i - window to i.

    The encoder begins with the full window and narrows it as it shortens time; the decoder begins where the encoder ended.
    """
    if not params.halve_window:
        return (params.attn_window,) * len(params.conv_strides)
    window = params.attn_window
    for stride in params.encoder_conv_strides:
        window //= stride
    windows = []
    for stride in params.conv_strides:
        window *= stride
        windows.append(window)
    return tuple(windows)


def conv_taps(kernel: int, stride: int) -> int:
    """Input steps that an output step of a causal convolution is made from; a stride above 1 means upsampling."""
    return -(-kernel // stride)


def left_reach_frames(params: CodecParams) -> int:
    """Frames before a frame that influence its samples; 21 in the released model.

    Walks back from the first patch of a frame, the one that reaches furthest, to the first frame that has a part in it.
    """
    step = -(params.patch_kernel - 1)
    levels = zip(
        params.conv_kernels, params.conv_strides, attention_windows(params), params.transformer_lengths, strict=True
    )
    for kernel, stride, window, layers in reversed(list(levels)):
        step = (step - layers * window) // stride - (conv_taps(kernel, stride) - 1)
    return -step
