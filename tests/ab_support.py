"""A comparison without an engine: a runner that draws block times from known noise."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from sdcontrol.experiments.config import Experiment
from sdcontrol.experiments.records import BlockRecord, Place, RunRecord
from sdcontrol.experiments.results import Setting
from sdcontrol.experiments.runner import Outputs

ROOT = Path(__file__).resolve().parent.parent
PLACE = Place(
    is_simulated=True,
    setting=Setting(machine="none", processor="none", threads=1, device="none", versions={}),
)


def experiment(**settings: object) -> Experiment:
    """Two arms, `off` and `on`; a valid file's settings with some replaced."""
    plain: dict[str, object] = {
        "name": "plain",
        "arms": [{"name": "off", "policy": "off"}, {"name": "on", "policy": "static:ngram:4"}],
        "workload": {"kinds": {"copy": 1}},
        "warmup": {"min_blocks": 0, "max_blocks": 0},
        "repeat_every": 0,
    }
    return Experiment.model_validate(plain | settings)


@dataclass
class NoisyRunner:
    """Every arm takes a second, by its factor and by noise that depends on block and try."""

    noise: float = 0.02
    factors: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0
    calls: list[tuple[str, int]] = field(default_factory=list)
    place: Place = PLACE

    def run_block(self, arm: str, block: int, *, start_seconds: float) -> tuple[RunRecord, Outputs]:
        self.calls.append((arm, block))
        tries = self.calls.count((arm, block))
        rng = np.random.default_rng([self.seed, block, tries, *arm.encode()])
        seconds = self.factors.get(arm, 1.0) * float(np.exp(self.noise * rng.normal()))
        return run_record(arm, seconds, start_seconds), {f"{block}.0": (1, 2, 3)}

    def close(self) -> None: ...


def run_record(arm: str, seconds: float, start_seconds: float = 0.0) -> RunRecord:
    return RunRecord(
        arm=arm,
        start_seconds=start_seconds,
        seconds=seconds,
        tokens=100,
        num_requests=1,
        metrics={"tokens_per_second": 100 / seconds},
    )


def blocks_of(ratios: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> list[BlockRecord]:
    """Blocks in which `on` is that much faster than `off`."""
    return [
        BlockRecord(
            block=number,
            is_warmup=False,
            runs=(run_record("off", 1.0), run_record("on", 1.0 / float(ratio))),
        )
        for number, ratio in enumerate(ratios)
    ]
