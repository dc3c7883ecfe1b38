"""What `benchmarks.learned` learns from and judges on: live recordings and simulated decodes."""

from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.simulated_regret import MACHINES
from benchmarks.simulated_regret import workload_of as made_up_texts
from sdcontrol.controller import Controller
from sdcontrol.core import Observation
from sdcontrol.engine.bundled import KINDS, held_out_prompts, load_bundled, load_bundled_tokenizer
from sdcontrol.engine.config import EngineConfig
from sdcontrol.engine.drafters.build import DrafterSpec
from sdcontrol.engine.loop import Engine
from sdcontrol.engine.request import Request
from sdcontrol.estimators.hardware import measure
from sdcontrol.estimators.roofline import Forward, RooflineCost
from sdcontrol.estimators.shapes import from_config
from sdcontrol.integrations.acceptance import add_acceptance_table
from sdcontrol.integrations.recording import facts_of_run
from sdcontrol.policies import Policy
from sdcontrol.traces.reader import Trace
from sdcontrol.traces.recorder import Recorder
from sdcontrol.traces.simulate import Simulation, SimulationSettings
from sdcontrol.traces.step_times import CostTimes, NoisyTimes, StepTimes
from sdcontrol.traces.workload import Workload

__all__ = ["SETTINGS", "Decode", "Recordings", "Setting", "decode", "made_up", "made_up_texts"]

NOISE = 0.05
_PREFILL_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Setting:
    """One live run: policy, batch, tokens of each prompt, requests, tokens of each answer."""

    policy: str
    batch: int
    prompt_tokens: int
    num_requests: int
    new_tokens: int

    @property
    def name(self) -> str:
        """Short."""
        return f"{self.policy}, batch {self.batch}, prompts of {self.prompt_tokens}"


SETTINGS = (
    Setting("goodput", 1, 256, 4, 48),
    Setting("goodput", 4, 256, 12, 48),
    Setting("goodput", 16, 256, 32, 40),
    Setting("goodput", 4, 1024, 8, 48),
    Setting("static:draft_model:3", 1, 256, 4, 40),
    Setting("static:draft_model:5", 4, 256, 10, 40),
    Setting("static:ngram:4", 8, 256, 18, 40),
    Setting("off", 8, 256, 18, 40),
)


class Recordings:
    """Runs of the bundled pair on this machine, of all kinds of texts, half of them sampled.

    Traces go to a folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        torch.set_num_threads(1)
        names = ("target", "draft")
        self._target, self._draft = (load_bundled(n, dtype=torch.float32) for n in names)
        self._tokenizer = load_bundled_tokenizer()

    def record(self, setting: Setting, seed: int, *, has_table: bool = False) -> Trace:
        """Decode once, live, and record; no prompt is that of another seed.

        With its acceptance table, computed afterwards, where it `has_table`.
        """
        path = self._folder / f"{setting.name}, seed {seed}"
        room = 2 * setting.batch * (setting.prompt_tokens + setting.new_tokens + 64)
        config = EngineConfig(
            max_batch_size=setting.batch, max_prefill_tokens=_PREFILL_TOKENS, kv_tokens=room
        )
        drafters: list[DrafterSpec] = ["ngram", "sparse_kv:128", self._draft]
        with Recorder(Controller(setting.policy), path, keep_token_ids=has_table) as recorder:
            engine = Engine(self._target, drafters=drafters, planner=recorder, config=config)
            recorder.describe(facts_of_run(engine, drafters))
            requests = self._decode(engine, setting, seed)
            engine.close()
        if has_table:
            add_acceptance_table(path, self._target, drafters, requests, config=config)
        return Trace(path)

    def _decode(self, engine: Engine, setting: Setting, seed: int) -> list[Request]:
        names = [
            engine.submit(
                self._prompt(setting, number, seed),
                seed=number,
                do_sample=number % 2 == 1,
                max_new_tokens=setting.new_tokens,
            )
            for number in range(setting.num_requests)
        ]
        requests = [engine.requests[name] for name in names]
        while engine.has_work:
            engine.step()
            engine.take_events()
        return requests

    def roofline(self) -> RooflineCost:
        """Of the two models, from their shapes and this machine's measured ceilings."""
        hardware = measure()
        target, draft = (
            Forward(from_config(model.config.to_dict(), role), hardware)
            for role, model in (("target", self._target), ("draft", self._draft))
        )
        return RooflineCost(target, {"draft_model": draft})

    def _prompt(self, setting: Setting, number: int, seed: int) -> list[int]:
        kind, tokens = KINDS[number % len(KINDS)], setting.prompt_tokens
        text = held_out_prompts(kind, 1, seed=1000 * seed + number, min_tokens=tokens)[0]
        return list(self._tokenizer(text)["input_ids"])[:tokens]


@dataclass(frozen=True, slots=True)
class Decode:
    """One simulated decode. The rate is that of steps with a full batch and no prompt beside it."""

    observations: tuple[Observation, ...]
    tokens_per_second: float


def decode(
    workload: Workload,
    policy: Policy | str,
    times: StepTimes,
    settings: SimulationSettings,
    *,
    seed: int,
) -> Decode:
    """Simulate to the end, with noise of `seed`."""
    noisy = NoisyTimes(times, relative_noise=NOISE, seed=seed)
    simulation = Simulation(workload, Controller(policy, clock=None), noisy, settings)
    seen: list[Observation] = []
    while simulation.has_work:
        seen.append(simulation.step())
    full = [
        o
        for o in seen
        if len(o.view.requests) == settings.max_batch_size and not o.view.prefill_tokens
    ]
    seconds = sum(o.timing.total_seconds for o in full)
    return Decode(tuple(seen), sum(sum(o.emitted) for o in full) / seconds)


def made_up(machine: str, batch: int, kind: str, policy: Policy | str, seed: int) -> Decode:
    """A cell of `benchmarks.simulated_regret`."""
    settings = SimulationSettings(
        max_batch_size=batch, max_prefill_tokens=4096, prefix_sharing=False
    )
    workload, times = made_up_texts(kind, batch, seed), CostTimes(MACHINES[machine])
    return decode(workload, policy, times, settings, seed=seed)
