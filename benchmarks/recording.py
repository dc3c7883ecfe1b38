"""What does recording cost, of a step's time, end to end?

    python -m benchmarks.recording [--seconds 90] [--json]

Two engines decode the same prompts with the bundled pair, one of them inside a `Recorder`. They take
turns of a few steps in random order, in one process; the policy plans by counts and not by times, so
that both always do the same work. Per batch size:

    wall        seconds of the recorded steps, of the plain ones
    cpu         the same of the CPU time of the thread that decodes
    writer      CPU time of the thread that writes the trace, of that of the plain steps
    end_to_end  `cpu` and `writer` together: to be at most 1.01

Ratios are of paired turns, 20 % trimmed means with a 95 % bootstrap interval. What the writer takes
of the other core may slow both arms alike, so that it would not show in `wall`; it is counted whole.
Closing a trace is stated beside, per recorded step.
"""

import argparse
import math
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.measuring import write_results
from sdcontrol.controller import Controller
from sdcontrol.core import Planner
from sdcontrol.engine.bundled import held_out_prompts, load_bundled, load_bundled_tokenizer
from sdcontrol.engine.config import EngineConfig
from sdcontrol.engine.loop import Engine
from sdcontrol.experiments.statistics import trimmed_ratio
from sdcontrol.traces.recorder import Recorder

POLICY = {"kind": "heuristic", "drafter": "draft_model"}
BATCHES = (1, 16)
PROMPT_TOKENS, NEW_TOKENS = 200, 256
TURN_STEPS = 4
FIRST_STEPS = 64  # of what is slow only once
CONFIG = EngineConfig(kv_tokens=16 * 512, max_batch_size=16, prefix_sharing=False)


@dataclass(slots=True)
class Arm:
    """An engine, and what its turns took."""

    engine: Engine
    prompts: Sequence[Sequence[int]]
    wall_seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # emitted and rejected: the work that was done
    num_rounds: int = 0

    def take_turn(self) -> None:
        """Some steps; prompts that have ended are decoded again from the beginning."""
        if not self.engine.has_work:
            self._submit()
        tokens = 0
        wall, cpu = time.perf_counter(), time.thread_time()
        for _ in range(TURN_STEPS):
            step = self.engine.step()
            tokens += sum(step.emitted) + sum(step.drafted)
        self.wall_seconds.append(time.perf_counter() - wall)
        self.cpu_seconds.append(time.thread_time() - cpu)
        self.tokens.append(tokens)
        self.engine.take_events()

    def forget(self) -> None:
        """What was measured so far does not count."""
        for values in (self.wall_seconds, self.cpu_seconds, self.tokens):
            values.clear()

    def _submit(self) -> None:
        for number, prompt in enumerate(self.prompts):
            name = f"r{self.num_rounds}-{number}"
            self.engine.submit(prompt, request_id=name, max_new_tokens=NEW_TOKENS)
        self.num_rounds += 1


class Models:
    """The bundled pair and its texts."""

    def __init__(self) -> None:
        self.target, self.draft = (
            load_bundled(name, dtype=torch.float32) for name in ("target", "draft")
        )
        self._tokenizer = load_bundled_tokenizer()

    def arm(self, planner: Planner, batch: int) -> Arm:
        """An engine with this planner."""
        drafters = ["ngram", self.draft]
        engine = Engine(self.target, drafters=drafters, planner=planner, config=CONFIG)
        texts = held_out_prompts("edit", batch, min_tokens=PROMPT_TOKENS)
        ids = [list(self._tokenizer(text)["input_ids"]) for text in texts]
        return Arm(engine, [tokens[:PROMPT_TOKENS] for tokens in ids])


def measure(models: Models, batch: int, most_seconds: float, folder: Path) -> dict[str, object]:
    """Turns of both arms until the time is over, and what closing the trace takes."""
    recorder = Recorder(Controller(POLICY), folder)
    plain, recorded = models.arm(Controller(POLICY), batch), models.arm(recorder, batch)
    rng = random.Random(0)
    take_turns([plain, recorded], rng, FIRST_STEPS // TURN_STEPS, math.inf)
    for arm in (plain, recorded):
        arm.forget()
    others = time.process_time() - time.thread_time()
    take_turns([plain, recorded], rng, 1 << 30, most_seconds)
    writer_seconds = time.process_time() - time.thread_time() - others
    if plain.tokens != recorded.tokens:
        raise SystemExit("the arms did not do the same work: their times cannot be compared")
    started = time.perf_counter()
    recorder.close()
    closing = time.perf_counter() - started
    for arm in (plain, recorded):
        arm.engine.close()
    return {"batch": batch, **summary(plain, recorded, writer_seconds, closing)}


def take_turns(arms: list[Arm], rng: random.Random, turns: int, most_seconds: float) -> None:
    """Turns of every arm, in random order."""
    until = time.perf_counter() + most_seconds
    for _ in range(turns):
        for arm in rng.sample(arms, len(arms)):
            arm.take_turn()
        if time.perf_counter() > until:
            break


def summary(plain: Arm, recorded: Arm, writer_seconds: float, closing: float) -> dict[str, object]:
    """Ratios with their intervals; microseconds per step."""
    wall = paired_ratio(recorded.wall_seconds, plain.wall_seconds)
    cpu = paired_ratio(recorded.cpu_seconds, plain.cpu_seconds)
    num_steps = TURN_STEPS * len(plain.cpu_seconds)
    step_seconds = sum(plain.cpu_seconds) / num_steps
    writer = writer_seconds / num_steps / step_seconds
    return {
        "steps": num_steps,
        "step_milliseconds": round(1e3 * step_seconds, 3),
        "wall": wall,
        "cpu": cpu,
        "writer": round(writer, 5),
        "end_to_end": [round(value + writer, 5) for value in cpu],
        "loop_microseconds_per_step": round(1e6 * (cpu[0] - 1.0) * step_seconds, 1),
        "writer_microseconds_per_step": round(1e6 * writer * step_seconds, 1),
        "closing_microseconds_per_step": round(1e6 * closing / (num_steps + FIRST_STEPS), 1),
    }


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """The ratio, and the ends of its interval."""
    found = trimmed_ratio([math.log(one / other) for one, other in zip(ours, theirs, strict=True)])
    return [round(value, 5) for value in (found.value, found.low, found.high)]


def main() -> None:
    """Measure, print, and write the results where asked."""
    parser = argparse.ArgumentParser(description="what recording costs, of a step's time")
    parser.add_argument("--seconds", type=float, default=90.0, help="per batch size")
    parser.add_argument(
        "--json", action="store_true", help="write benchmarks/results/recording.json"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)  # so that all other CPU time of the process is the writer's
    models, results = Models(), []
    for batch in BATCHES:
        with tempfile.TemporaryDirectory() as folder:
            results.append(measure(models, batch, options.seconds, Path(folder) / "trace"))
        print("  ".join(f"{name} {value}" for name, value in results[-1].items()), flush=True)
    if options.json:
        command = f"python -m benchmarks.recording --seconds {options.seconds:g} --json"
        print(write_results("recording", command, results))


if __name__ == "__main__":
    main()
