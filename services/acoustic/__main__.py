"""Entry point: python -m services.acoustic."""

from services.acoustic.engine import create_engine
from stage_runtime.process import run_stage

if __name__ == "__main__":
    run_stage("voxtral.acoustic", create_engine)
