"""The language model of Voxtral TTS: weights, key-value cache, prefill and decode. Knows no requests and no text."""

from services.thinker.model.cache import KeyValueCache, cache_length, slot_bytes
from services.thinker.model.transformer import DecodeRow, Thinker
from services.thinker.model.weights import ThinkerWeights

__all__ = ["DecodeRow", "KeyValueCache", "Thinker", "ThinkerWeights", "cache_length", "slot_bytes"]
