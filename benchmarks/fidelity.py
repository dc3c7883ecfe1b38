"""Does the what-if replay predict what live runs measure, and rank policies as they do?

    python -m benchmarks.fidelity [--blocks N] [--json]

Live runs of the bundled pair on this machine, in blocks. Every block has two kinds of runs in random
order, so that what the machine drifts it does to both:

    calibration   other batch sizes, lengths and texts: step times are fitted to these, and only these
    judged        4 policies in 3 cells (batch size x kind of text): predicted and measured

A prediction takes the texts' acceptance table, the policy itself and the fitted times; throughput is
tokens over the seconds of all steps, over all blocks. Ranks are compared within a cell, wherever two
policies differ by more than 5 % as measured.
"""

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
import torch

from benchmarks.measuring import write_results
from sdcontrol.controller import Controller
from sdcontrol.core import Observation
from sdcontrol.engine.acceptance_rollouts import acceptance_outcomes
from sdcontrol.engine.bundled import held_out_prompts, load_bundled, load_bundled_tokenizer
from sdcontrol.engine.config import EngineConfig
from sdcontrol.engine.loop import Engine
from sdcontrol.engine.request import Request
from sdcontrol.traces.fitted_times import FittedTimes
from sdcontrol.traces.simulate import SimulationSettings
from sdcontrol.traces.what_if import simulate
from sdcontrol.traces.workload import SimulatedRequest, Workload

JUDGED_POLICIES = ("off", "static:ngram:4", "static:draft_model:3", "goodput")
JUDGED_CELLS = (("edit", 1), ("prose", 4), ("code", 12))
CALIBRATION = (
    ("off", "records", 1),
    ("off", "copy", 6),
    ("off", "records", 16),
    ("static:ngram:5", "records", 1),
    ("static:ngram:7", "copy", 3),
    ("static:ngram:2", "records", 8),
    ("static:draft_model:2", "copy", 1),
    ("static:draft_model:5", "records", 2),
    ("static:draft_model:4", "copy", 8),
    ("static:draft_model:1", "records", 16),
    ("goodput", "copy", 3),
    ("goodput", "records", 16),
)
CONFIG = EngineConfig(kv_tokens=16384, max_batch_size=32)
PROMPT_TOKENS, NEW_TOKENS = 200, 64


class Kept(Controller):
    """A controller that keeps what it observes."""

    def __init__(self, policy: str) -> None:
        super().__init__(policy)
        self.observations: list[Observation] = []

    def observe(self, observation: Observation) -> None:
        """Learn, and keep."""
        self.observations.append(observation)
        super().observe(observation)


@dataclass(slots=True)
class Run:
    """One configuration, and what it measured in all blocks."""

    policy: str
    kind: str
    batch: int
    is_judged: bool
    observations: list[Observation] = field(default_factory=list)
    tokens: int = 0

    @property
    def seconds(self) -> float:
        """Of all steps."""
        return sum(observation.timing.total_seconds for observation in self.observations)


class Live:
    """The bundled pair and its texts."""

    def __init__(self) -> None:
        self.target, self.draft = (
            load_bundled(n, dtype=torch.float32) for n in ("target", "draft")
        )
        self._tokenizer = load_bundled_tokenizer()
        self._prompts: dict[tuple[str, int], list[list[int]]] = {}

    @property
    def drafters(self) -> list[object]:
        """What every run may use."""
        return ["ngram", self.draft]

    def prompts(self, kind: str, batch: int) -> list[list[int]]:
        """So many of a kind, the same at every call."""
        if (kind, batch) not in self._prompts:
            texts = held_out_prompts(kind, batch, min_tokens=PROMPT_TOKENS)
            ids = [list(self._tokenizer(text)["input_ids"]) for text in texts]
            self._prompts[kind, batch] = [tokens[:PROMPT_TOKENS] for tokens in ids]
        return self._prompts[kind, batch]

    def run(self, run: Run) -> list[Request]:
        """Decode once; what was observed is added to `run`."""
        planner = Kept(run.policy)
        with Engine(self.target, drafters=self.drafters, planner=planner, config=CONFIG) as engine:
            for number, prompt in enumerate(self.prompts(run.kind, run.batch)):
                engine.submit(prompt, request_id=f"r{number}", max_new_tokens=NEW_TOKENS)
            finished = engine.run()
        run.observations += planner.observations
        run.tokens += sum(request.generated_tokens for request in finished.values())
        return [finished[f"r{number}"] for number in range(run.batch)]

    def workload(self, kind: str, batch: int) -> Workload:
        """The judged texts with their acceptance table."""
        requests = self.run(Run("off", kind, batch, is_judged=False))
        table = dict(acceptance_outcomes(self.target, self.drafters, requests, config=CONFIG))
        simulated = [
            SimulatedRequest(
                request.id,
                0.0,
                request.prompt_tokens,
                request.generated_tokens,
                table[request.id],
                max_output_tokens=NEW_TOKENS,
                contents=np.array(request.tokens, dtype=np.int64),
            )
            for request in requests
        ]
        return Workload.of(f"{kind} x {batch}", simulated)


def measure(live: Live, blocks: int, most_seconds: float) -> list[Run]:
    """Every configuration once per block, in random order."""
    judged = [Run(p, kind, b, True) for p in JUDGED_POLICIES for kind, b in JUDGED_CELLS]
    runs = judged + [Run(*facts, False) for facts in CALIBRATION]
    for policy in JUDGED_POLICIES:  # whatever is slow only the first time
        live.run(Run(policy, "records", 2, is_judged=False))
    rng, started = random.Random(0), time.perf_counter()
    for block in range(1, blocks + 1):
        for run in rng.sample(runs, len(runs)):
            live.run(run)
        spent = time.perf_counter() - started
        print(f"block {block} of {blocks}: {spent:.0f} s", flush=True)
        if spent * (block + 1) / block > most_seconds:
            break
    return runs


def judge(live: Live, runs: Sequence[Run]) -> Iterator[dict[str, object]]:
    """Predicted beside measured, for every judged configuration."""
    calibration = [run for run in runs if not run.is_judged]
    times = FittedTimes(seen for run in calibration for seen in run.observations)
    settings = SimulationSettings(
        **CONFIG.model_dump(include={"block_size", "max_batch_size", "max_prefill_tokens"}),
        kv_tokens=CONFIG.kv_tokens,
    )
    for kind, batch in JUDGED_CELLS:
        workload = live.workload(kind, batch)
        for run in (r for r in runs if r.is_judged and (r.kind, r.batch) == (kind, batch)):
            controller = run.policy.partition(":")[0]
            alike = [r for r in calibration if r.policy.partition(":")[0] == controller]
            own = times.with_controller_of(seen for r in alike for seen in r.observations)
            told = simulate(workload, run.policy, own, settings)
            measured, predicted = run.tokens / run.seconds, told.tokens_per_busy_second
            yield {
                "cell": workload.name,
                "policy": run.policy,
                "measured_tokens_per_second": round(measured, 2),
                "predicted_tokens_per_second": round(predicted, 2),
                "error": round(predicted / measured - 1.0, 4),
            }


def ranks(rows: Sequence[dict[str, object]]) -> tuple[int, list[str]]:
    """Pairs of a cell that differ by more than 5 %, and those that were ranked wrongly."""
    pairs, wrong = 0, []
    for one, other in combinations(rows, 2):
        if one["cell"] != other["cell"]:
            continue
        measured = [float(str(row["measured_tokens_per_second"])) for row in (one, other)]
        predicted = [float(str(row["predicted_tokens_per_second"])) for row in (one, other)]
        if max(measured) > 1.05 * min(measured):
            pairs += 1
            if (measured[0] > measured[1]) != (predicted[0] > predicted[1]):
                wrong.append(f"{one['cell']}: {one['policy']} and {other['policy']}")
    return pairs, wrong


def main() -> None:
    """Measure, predict, print, and write the results where asked."""
    parser = argparse.ArgumentParser(description="predicted against measured throughput")
    parser.add_argument("--blocks", type=int, default=30)
    parser.add_argument(
        "--seconds", type=float, default=400.0, help="no block begins that would end later"
    )
    parser.add_argument(
        "--json", action="store_true", help="write benchmarks/results/fidelity.json"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)  # more would wait for one another wherever a core is busy
    live = Live()
    rows = list(judge(live, measure(live, options.blocks, options.seconds)))
    for row in rows:
        print("  ".join(f"{value}" for value in row.values()))
    errors = np.abs([float(str(row["error"])) for row in rows])
    pairs, wrong = ranks(rows)
    summary: dict[str, object] = {
        "configurations": len(rows),
        "median_error": round(float(np.median(errors)), 4),
        "worst_error": round(float(errors.max()), 4),
        "pairs_more_than_5_percent_apart": pairs,
        "ranked_wrongly": wrong,
    }
    print(summary)
    if options.json:
        command = f"python -m benchmarks.fidelity --blocks {options.blocks} --json"
        print(write_results("fidelity", command, [summary, *rows]))


if __name__ == "__main__":
    main()
