"""Stage voxtral.codec: the audio tokenizer's decoder of Voxtral TTS, frames of audio codes to samples."""
