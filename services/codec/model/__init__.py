"""The decoder of Voxtral TTS's audio tokenizer: codes to samples. Knows no requests and no batching."""

from services.codec.model.decoder import CodecDecoder
from services.codec.model.geometry import left_reach_frames
from services.codec.model.weights import PREFIX, CodecWeights

__all__ = ["PREFIX", "CodecDecoder", "CodecWeights", "left_reach_frames"]
