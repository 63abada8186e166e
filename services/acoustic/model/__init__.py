"""The acoustic head of Voxtral TTS: semantic code, flow matching, quantisation. Knows no requests and no batching."""

from services.acoustic.model.head import AcousticHead, FrameInputs, Frames
from services.acoustic.model.weights import AcousticWeights

__all__ = ["AcousticHead", "AcousticWeights", "FrameInputs", "Frames"]
