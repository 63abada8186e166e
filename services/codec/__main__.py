"""Entry point: python -m services.codec."""

from services.codec.engine import create_engine
from stage_runtime.process import run_stage

if __name__ == "__main__":
    run_stage("voxtral.codec", create_engine)
