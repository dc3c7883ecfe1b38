"""One engine that every arm of a case decodes with, one after the other.

An arm is a controller and what it has learned; it is put into the engine with its own step count,
so that it sees a decode without gaps. Between arms nothing is left but the cached contexts.
"""

import gc
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from benchmarks.regret.contexts import is_in_place, lay_out
from benchmarks.regret.grid import Case
from benchmarks.regret.pairs import LateDraftModel, Pair, Prompt, load_pair, prompts_of, seed_of
from benchmarks.regret.shadows import SyntheticEngine
from sdcontrol.controller import Controller
from sdcontrol.core import Observation
from sdcontrol.engine.config import EngineConfig
from sdcontrol.engine.generation import decoding_of, prepare_config
from sdcontrol.engine.loop import Engine
from sdcontrol.engine.stats import EngineStats, Tally
from sdcontrol.policies import Policy

__all__ = ["Arm", "Rig", "Run"]

_TRAINING_SEED = 1000


@dataclass(slots=True)
class Arm:
    """A policy with its memory. `tally` tells it the number of a step."""

    name: str
    spec: str | Mapping[str, object] | Policy
    controller: Controller = field(init=False)
    tally: Tally = field(default_factory=Tally)

    def __post_init__(self) -> None:
        self.controller = Controller(self.spec)

    @property
    def stats(self) -> EngineStats:
        """Of all its steps."""
        return self.tally.stats

    @property
    def share_ahead(self) -> float:
        """Of its steps, those that were launched before the last one's tokens were known."""
        return round(self.stats.launched_ahead / max(self.stats.steps, 1), 3)


@dataclass(frozen=True, slots=True)
class Run:
    """One arm's decode of one phase."""

    tokens: int  # emitted while time was taken
    seconds: float
    stats: EngineStats  # of the timed steps
    controller_shares: tuple[float, ...]  # plan and observe over the step, per step
    outputs: tuple[tuple[int, ...], ...]  # of the first requests, as far as they came
    observations: tuple[Observation, ...]  # of the timed steps

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


class Rig:
    """The engine of a case, its contexts in place."""

    def __init__(self, case: Case, *, is_tiny: bool = False) -> None:
        self.case = case
        self.pair: Pair = load_pair(case, is_tiny=is_tiny)
        self.phases = _phases(case, is_synthetic=self.pair.is_synthetic)
        self.training = self.phases  # synthetic acceptance knows seeds only
        if not self.pair.is_synthetic:
            self.training = _phases(case, is_synthetic=False, first_seed=_TRAINING_SEED)
        everything = (*self.phases, *self.training)
        prompts = list(dict.fromkeys(prompt for phase in everything for prompt in phase))
        room = case.tokens * max(phase.stretch for phase in case.phases) + 32
        kv_tokens = sum(len(prompt.tokens) + room + 32 for prompt in prompts)
        self.sparse = f"sparse_kv:{case.sparse_budget}"
        draft = LateDraftModel(self.pair.draft) if case.catches_up else self.pair.draft
        engine = SyntheticEngine if self.pair.is_synthetic else Engine
        self.engine = engine(
            self.pair.target,
            drafters={
                "ngram": self.pair.ngram,
                self.sparse: self.sparse,
                "draft_model": draft,
            },
            verification=self.pair.verifier,
            config=EngineConfig(kv_tokens=kv_tokens + kv_tokens // 8, max_batch_size=64),
        )
        lay_out(self.engine, prompts, room=room, computed=not self.pair.is_synthetic)
        self._catch_up()
        gc.collect()
        gc.freeze()  # models, prompts and libraries: else each collection looks through them

    def _catch_up(self) -> None:
        """The draft model's contexts, once and for all."""
        warm = Arm("catch-up", "static:draft_model:1")
        for phase in range(len(self.phases)):
            for is_training in (True, False):
                self.run(warm, phase, 0, tokens=3, is_training=is_training)
            prompts = (*self.phases[phase], *self.training[phase])
            assert all(is_in_place(self.engine, prompt) for prompt in prompts)

    def run(
        self,
        arm: Arm,
        phase: int,
        block: int,
        *,
        tokens: int | None = None,
        is_training: bool = False,
    ) -> Run:
        """Decode a phase at its batch size, from its contexts; the first admission is not timed.

        A request that ends begins again, so that no arm is measured by its slowest request, at a
        batch that shrinks, unless the case is closed; `tokens` per request (the case's, by default),
        stretched, are decoded in all.
        """
        self._put_in(arm)
        gc.collect()
        engine, prompts = self.engine, (self.training if is_training else self.phases)[phase]
        length = (tokens or self.case.tokens) * self.case.phases[phase].stretch
        slots = self._begin(prompts, block, length)
        requests = [engine.requests[name] for name in slots]
        engine.step()
        self._keep_to_themselves(slots)
        timed, shares, observations = EngineStats(), [], []
        target = len(prompts) * length * self.case.generations
        started = time.perf_counter()
        while engine.has_work if self.case.is_closed else timed.emitted < target:
            before = engine.planner.observe_seconds
            observation = engine.step()
            timed.add(observation)
            observations.append(observation)
            more = engine.planner.observe_seconds - before
            shares.append(_controller_share(observation, more))
            if not self.case.is_closed:
                self._begin_again(slots, prompts, block, length)
        seconds = time.perf_counter() - started
        self._drop(slots)
        outputs = tuple(tuple(request.output) for request in requests)
        return Run(timed.emitted, seconds, timed, tuple(shares), outputs, tuple(observations))

    def _begin(self, prompts: list[Prompt], block: int, length: int) -> dict[str, int]:
        """The first requests, by name; those that the draft model knows nothing of shall not end all at once."""
        count = len(prompts)
        lengths = [length] * count
        if self.case.catches_up:
            lengths = [max(length * (i + 1) // count, 2) for i in range(count)]
        rows = enumerate(zip(prompts, lengths, strict=True))
        return {self._submit(prompt, i, block, tokens): i for i, (prompt, tokens) in rows}

    def _begin_again(
        self, slots: dict[str, int], prompts: list[Prompt], block: int, length: int
    ) -> None:
        """Requests that ended, as those of the next turn."""
        for name in [name for name in slots if name not in self.engine.requests]:
            index = slots.pop(name) + len(prompts)
            prompt = prompts[index % len(prompts)]
            slots[self._submit(prompt, index, block, length)] = index
        self._keep_to_themselves(slots)

    def _drop(self, names: Iterable[str]) -> None:
        for name in names:
            self.engine.cancel(name)
        while self.engine.has_work:
            self.engine.step()
        self.engine.take_events()

    def _keep_to_themselves(self, names: Iterable[str]) -> None:
        """Requests that were admitted share no more: the next arm finds the contexts, nothing else."""
        for request in map(self.engine.requests.get, names):
            if request is not None and request.scheduled.cached_tokens:
                request.scheduled.shareable = False

    def close(self) -> None:
        """Free the memory."""
        gc.unfreeze()
        self.engine.close()

    def _put_in(self, arm: Arm) -> None:
        """As if the engine had been made with this planner: off tells its drafters nothing."""
        engine = self.engine
        engine._decode_by(arm.controller)
        engine._tally = arm.tally

    def _submit(self, prompt: Prompt, index: int, block: int, tokens: int) -> str:
        options = {"max_new_tokens": tokens, "do_sample": False}
        config = prepare_config(self.pair.target, None, len(prompt.tokens), options)
        seed = seed_of(prompt.kind, block, index)
        decoding = decoding_of(self.pair.target, config, prompt.tokens, seed=seed)
        return self.engine.enqueue(prompt.tokens, decoding)


def _phases(case: Case, *, is_synthetic: bool, first_seed: int = 0) -> list[list[Prompt]]:
    if case.shares_prompts:
        largest = max(case.phases, key=lambda phase: phase.batch_size)
        prompts = prompts_of(largest, is_synthetic=is_synthetic, seed=first_seed)
        return [prompts[: phase.batch_size] for phase in case.phases]
    return [
        prompts_of(phase, is_synthetic=is_synthetic, seed=seed)
        for seed, phase in enumerate(case.phases, first_seed)
    ]


def _controller_share(observation: Observation, more: float) -> float:
    """Of a step, from its plan to its own observing, which took `more` than that of the step before.

    The latter is in the step's timing.
    """
    total = observation.timing.total_seconds + more
    return (observation.timing.controller_seconds + more) / total if total > 0.0 else 0.0
