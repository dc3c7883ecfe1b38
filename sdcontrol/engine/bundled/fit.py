"""The training loop.

The schedule runs on the clock: the loop is told how long it may take, and what it does depends on
the share of that time which has passed. How many steps that made is written beside the weights.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from sdcontrol.engine.bundled import workers
from sdcontrol.engine.bundled.models import load, save
from sdcontrol.engine.bundled.optimiser import Optimiser
from sdcontrol.whole_files import write_whole

_SAVE_SECONDS = 120.0
_REPORT_STEPS = 10


@dataclass(frozen=True, slots=True)
class Task:
    """What is learned: `batch(share)` gives ids for a share of the time, `loss` judges the
    models."""

    models: Mapping[str, LlamaForCausalLM]
    batch: Callable[[float], Tensor]
    loss: Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Run:
    """Where, how long and on what."""

    output: Path
    minutes: float
    device: str
    is_compiled: bool


@dataclass(slots=True)
class Progress:
    """What has been done so far, by all workers together."""

    share: float = 0.0  # of the time
    steps: int = 0
    tokens: int = 0

    def __str__(self) -> str:
        return f"{self.share:.1%} step {self.steps} tokens {self.tokens / 1e6:.2f}M"


def fit(task: Task, run: Run) -> Progress:
    """Train until the time is up, or go on with an interrupted run into the same folder."""
    model = nn.ModuleDict(task.models)
    optimiser = Optimiser(model, matrix_rate=0.02, other_rate=0.003)
    loss = torch.compile(task.loss, dynamic=False) if run.is_compiled else task.loss
    progress = _resumed(task, run)
    already, begun = progress.share, time.monotonic()
    saved = begun
    while progress.share < 1:
        value = _gradients(task.batch(progress.share).to(run.device), loss, run.device, progress)
        workers.average_gradients(model)
        optimiser.step(rate_scale(progress.share))
        if progress.steps % _REPORT_STEPS == 0 and workers.is_first():
            print(f"{progress} loss {value.item():.3f}", flush=True)
        if time.monotonic() - saved > _SAVE_SECONDS:
            _save(task, run, progress)
            saved = time.monotonic()
        progress.share = workers.agreed(already + (time.monotonic() - begun) / (60 * run.minutes))
    _save(task, run, progress)
    return progress


def rate_scale(share: float) -> float:
    """What the learning rates are multiplied by: up, level, then straight down to nothing."""
    return min(1.0, share / 0.02 + 0.01, (1 - share) / 0.6)


def _gradients(
    ids: Tensor, loss: Callable[[Tensor], Tensor], device: str, progress: Progress
) -> Tensor:
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        value = loss(ids)
    value.backward()
    progress.steps += 1
    progress.tokens += ids.numel() * workers.count()
    return value.detach()


def _save(task: Task, run: Run, progress: Progress) -> None:
    if workers.is_first():
        for name, model in task.models.items():
            save(model, run.output / name)
        note = {**asdict(progress), "minutes": run.minutes}
        write_whole(run.output / "progress.json", (json.dumps(note) + "\n").encode())


def _resumed(task: Task, run: Run) -> Progress:
    path = run.output / "progress.json"
    if not path.exists():
        return Progress()
    for name, model in task.models.items():
        if (run.output / name).exists():
            model.load_state_dict(load(run.output / name).state_dict())
    note = json.loads(path.read_text())
    return Progress(note["share"], note["steps"], note["tokens"])
