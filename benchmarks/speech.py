"""Speech on the embedded installation, all processes real: throughput, first audio, start-up, memory.

Each request asks for at most 25 frames (2 s of audio) and streams. Ratios compare the concurrency levels of the same run with one
request at a time.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.common import percentile, report
from omnistage import AsyncClient
from stage_runtime import config
from stage_runtime.supervise import Supervisor

ROOT = Path(__file__).resolve().parents[1]
LEVELS = (1, 4, 16, 32)
REQUESTS = {1: 12, 4: 32, 16: 64, 32: 96}
FRAMES = 25
FRAME_S = 0.08
# The model ends early for some texts; this one and these seeds are only what they are.
TEXT = "the quick brown fox, 42!"
READY_TIMEOUT_S = 120.0


async def one(client: AsyncClient, voice: str, seed: int) -> tuple[float, float, int]:
    """Seconds until the first audio, seconds in all, frames."""
    started = time.perf_counter()
    first = 0.0
    frames = 0
    async with client.stream(TEXT, voice=voice, seed=seed, max_frames=FRAMES, timeout_s=120) as stream:
        async for chunk in stream:
            first = first or time.perf_counter() - started
            frames += chunk.sample_count
    return first, time.perf_counter() - started, round(frames / (24_000 * FRAME_S))


async def level(client: AsyncClient, voice: str, concurrency: int) -> dict[str, float]:
    """Figures at one concurrency."""
    gate = asyncio.Semaphore(concurrency)

    async def gated(seed: int) -> tuple[float, float, int]:
        async with gate:
            return await one(client, voice, seed)

    started = time.perf_counter()
    results = await asyncio.gather(*(gated(seed) for seed in range(REQUESTS[concurrency])))
    took = time.perf_counter() - started
    audio_s = sum(frames for _, _, frames in results) * FRAME_S
    return {
        f"requests_per_s_{concurrency}": len(results) / took,
        f"first_audio_p50_s_{concurrency}": percentile([first for first, _, _ in results], 50),
        f"real_time_factor_{concurrency}": percentile([total / (frames * FRAME_S) for _, total, frames in results], 50),
        f"audio_s_per_s_{concurrency}": audio_s / took,
        f"mean_audio_s_{concurrency}": audio_s / len(results),
    }


async def measure(folder: Path) -> None:
    """Start everything, measure each level, report."""
    file = ROOT / "omnistage.yaml"
    stages = config.load(file).stages
    changes = [
        f"run_dir={folder / 'run'}",
        f'router.listen=["unix:{folder / "router.sock"}"]',
        *(f'stages.{name}.addresses=["unix:{folder / name}.sock"]' for name in stages),
    ]
    installation = config.load(file, overrides=changes)
    async with Supervisor(installation, file, overrides=changes) as system:
        figures = {"ready_s": await system.ready(READY_TIMEOUT_S)}
        client = AsyncClient(installation.router.listen[0])
        voice = (await client.voices())[0].name
        for concurrency in LEVELS:
            await asyncio.gather(*(one(client, voice, seed) for seed in range(concurrency)))
            figures |= await level(client, voice, concurrency)
        figures["resident_bytes_of_all_processes"] = float(
            sum(psutil.Process(child.pid).memory_info().rss for child in system.children if child.pid)
        )
        await client.close()
    base = figures["requests_per_s_1"]
    report("speech", figures, {f"throughput_{n}_vs_1": figures[f"requests_per_s_{n}"] / base for n in LEVELS[1:]})


def main() -> None:
    """Entry point."""
    with tempfile.TemporaryDirectory(prefix="omnistage-") as folder:
        asyncio.run(measure(Path(folder)))


if __name__ == "__main__":
    main()
