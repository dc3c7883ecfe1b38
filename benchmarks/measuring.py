"""What every benchmark shares: taking turns, and writing down where it ran.

A figure is a ratio of two arms inside one block, medians over blocks; absolute times of a shared
machine say little.
"""

import gc
import json
import platform
import random
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from functools import cache
from pathlib import Path

import torch
import transformers

from sdcontrol import __version__

RESULTS = Path(__file__).parent / "results"


def take_turns(
    arms: Mapping[str, Callable[[], object]], *, blocks: int, seed: int = 0
) -> dict[str, list[float]]:
    """Seconds of each arm per block. Arms run in random order; a first block is not counted."""
    rng = random.Random(seed)
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for block in range(blocks + 1):
        for name in rng.sample(sorted(arms), len(arms)):
            gc.collect()
            started = time.perf_counter()
            arms[name]()
            if block:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def setting() -> dict[str, object]:
    """Machine, versions and date, for the record."""
    return {
        "date": date.today().isoformat(),
        "machine": platform.machine(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "device": _device_name(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "sdcontrol": __version__,
        },
    }


@cache
def _device_name() -> str:
    """Asked once: after some errors a device answers no more."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def where(facts: Mapping[str, object]) -> dict[str, object]:
    """The date and the processor of a `setting`, for rows that are measured apart."""
    return {key: facts[key] for key in ("date", "processor")}


def write_results(
    name: str, command: str, results: Sequence[Mapping[str, object]], *, folder: Path = RESULTS
) -> Path:
    """Write `<name>.json` to `folder`; a run that is killed leaves the file of before, or the new."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    facts = {"command": command, **setting(), "results": list(results)}
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)
    return path


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if "model name" in line), "unknown")
