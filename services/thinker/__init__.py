"""The thinker stage of Voxtral TTS: text and voice to a prompt, frames of codes to the hidden states that next frames are made from."""
