"""Serve a fake stage; see the package's docstring."""

from typing import Any

from stage_runtime.config import StageSettings
from stage_runtime.engine import Engine
from stage_runtime.process import run_stage
from stage_runtime.testing.speech import FakeAcoustic, FakeCodec, FakeSettings, FakeThinker
from stage_runtime.testing.toy import ToyEngine, ToySettings


def create_engine(settings: StageSettings) -> Engine[Any]:
    """The engine of the kind that the settings name."""
    fakes = {fake.kind: fake for fake in (FakeThinker, FakeAcoustic, FakeCodec)}
    if settings.kind in fakes:
        return fakes[settings.kind](FakeSettings.model_validate(settings.engine))
    return ToyEngine(ToySettings.model_validate(settings.engine))


if __name__ == "__main__":
    run_stage(None, create_engine)
