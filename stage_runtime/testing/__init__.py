"""Stages for tests: they speak the whole protocol and need no model. Shipped, so that pipelines of others can be tested too.

`python -m stage_runtime.testing --config FILE --stage NAME` serves one of the kinds below; its settings stand under `engine`.

fake.thinker, fake.acoustic, fake.codec
    Stand for the stages of a speech pipeline. What they compute is simple arithmetic on what they get, so that a test sees at once
    whether a frame was lost, doubled, or given to another request.
toy
    One engine with every way to behave and to fail, chosen by each request.
"""

from stage_runtime.testing.faults import Fault, FaultSettings
from stage_runtime.testing.speech import FakeAcoustic, FakeCodec, FakeThinker, expected_pcm
from stage_runtime.testing.toy import ToyEngine, ToyParams, ToySettings

__all__ = [
    "FakeAcoustic",
    "FakeCodec",
    "FakeThinker",
    "Fault",
    "FaultSettings",
    "ToyEngine",
    "ToyParams",
    "ToySettings",
    "expected_pcm",
]
