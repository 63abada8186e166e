"""Stage voxtral.acoustic: the flow-matching transformer of Voxtral TTS, hidden states to frames of audio codes."""
