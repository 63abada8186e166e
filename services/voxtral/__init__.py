"""What the three Voxtral TTS stages share: the checkpoint layout and the layers. A library, no service."""
