"""`make demo`: start router and stages on the embedded models, say a sentence, stop, and tell how it went.

Everything runs on Unix sockets in a temporary folder, so that neither a taken port nor a running server is in the way.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import os
import platform
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from omnistage import AsyncClient, Clip
from stage_runtime import config
from stage_runtime.child import Child
from stage_runtime.process_plan import ROUTER
from stage_runtime.supervise import Supervisor

ROOT = Path(__file__).resolve().parents[1]
SENTENCE = "The server is running."
PACKAGES = ("omnistage", "grpcio", "protobuf", "numpy", "torch", "safetensors", "mistral-common")
READY_TIMEOUT_S = 120.0
SPEAK_TIMEOUT_S = 120.0


def overrides(sockets: Path, run_dir: Path) -> list[str]:
    """Settings that move the installation onto sockets in one folder."""
    stages = config.load(ROOT / "omnistage.yaml").stages
    return [
        f"run_dir={run_dir}",
        f'router.listen=["unix:{sockets / "router.sock"}"]',
        *(f'stages.{name}.addresses=["unix:{sockets / name}.sock"]' for name in stages),
    ]


def tell(text: str) -> None:
    """Show progress."""
    print(f"demo: {text}", flush=True)


async def speak(address: str, text: str, out: Path) -> tuple[Clip, float]:
    """Say `text` into out/hello.wav, showing the audio as it comes; returns the clip and the first-audio latency in seconds."""
    client = AsyncClient(address)
    try:
        voice = (await client.voices())[0].name
        started = time.monotonic()
        first_audio_s = 0.0
        seconds = 0.0
        async with client.stream(text, voice=voice, seed=1, max_frames=250, timeout_s=SPEAK_TIMEOUT_S) as stream:
            async for chunk in stream:
                first_audio_s = first_audio_s or time.monotonic() - started
                seconds += chunk.sample_count / chunk.sample_rate_hz
                tell(f"{seconds:5.2f} s of audio after {time.monotonic() - started:5.2f} s")
        clip = await client.synthesize(text, voice=voice, seed=1, max_frames=250, timeout_s=SPEAK_TIMEOUT_S)
        clip.save(out / "hello.wav")
        return clip, first_audio_s
    finally:
        await client.close()


async def run(text: str, out: Path) -> None:
    """The demo."""
    with tempfile.TemporaryDirectory(prefix="omnistage-") as folder:
        sockets = Path(folder)
        changes = overrides(sockets, out / "demo")
        installation = config.load(ROOT / "omnistage.yaml", overrides=changes)

        def show(child: Child) -> None:
            tell(f"{child.plan.name}: {child.state.value}")

        tell(f"starting {ROUTER} and {len(installation.stages)} stages")
        async with Supervisor(installation, ROOT / "omnistage.yaml", overrides=changes, on_change=show) as system:
            ready_s = await system.ready(READY_TIMEOUT_S)
            tell(f"ready after {ready_s:.1f} s; saying {text!r}")
            clip, first_audio_s = await speak(installation.router.listen[0], text, out)
    report(text, clip, first_audio_s, ready_s, out)


def report(text: str, clip: Clip, first_audio_s: float, ready_s: float, out: Path) -> None:
    """Write out/demo.json and show the most important of it."""
    result = clip.result
    audio_s = result.usage.sample_count / clip.sample_rate_hz
    facts = {
        "text": text,
        "result": asdict(result),
        "audio_seconds": audio_s,
        "real_time_factor": result.timings.total_s / audio_s,
        "first_audio_seconds": first_audio_s,
        "ready_seconds": ready_s,
        "machine": {"platform": platform.platform(), "cores": os.cpu_count(), "python": platform.python_version()},
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
    }
    (out / "demo.json").write_text(json.dumps(facts, indent=2) + "\n")
    tell(
        f"{audio_s:.2f} s of audio in {result.timings.total_s:.2f} s "
        f"(real-time factor {facts['real_time_factor']:.2f}), first audio after {first_audio_s:.3f} s"
    )
    tell(f"wrote {out / 'hello.wav'} and {out / 'demo.json'}; all processes have stopped")
    tell("the embedded model is untrained, so this is noise, not speech: it shows that every stage works")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", default=SENTENCE)
    parser.add_argument("--out", type=Path, default=Path("out"))
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    asyncio.run(run(options.text, out))


if __name__ == "__main__":
    main()
