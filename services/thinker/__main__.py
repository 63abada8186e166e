"""Entry point: python -m services.thinker."""

from services.thinker.engine import create_engine
from stage_runtime.process import run_stage

if __name__ == "__main__":
    run_stage("voxtral.thinker", create_engine)
