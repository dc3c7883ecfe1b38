"""How often rounding alone changes greedy text: ours beside that of `generate` itself.

    python -m benchmarks.divergence [--dtype bfloat16] [--prompts 48] [--tokens 96] [--models FOLDER]

In low precision the order of additions decides near-ties, so that `generate` itself writes other
text when its batch size changes. Every arm is compared with `generate` of each prompt alone, up to
the first token that differs; a rate is first differences per token compared. In float32 all are 0,
or next to it: there `tests/test_engine_exact.py` demands it.
"""

import argparse
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from benchmarks.engine import Models, load
from benchmarks.measuring import write_results
from sdcontrol.core import BatchView, Choice, Confidence, Observation, Plan
from sdcontrol.engine.bundled import KINDS, held_out_prompts
from sdcontrol.engine.config import EngineConfig
from sdcontrol.engine.drafters.build import DrafterSpec
from sdcontrol.engine.loop import Engine

Texts = list[list[int]]
_Z = 1.96  # of a 95 % interval


class AnyPlan:
    """A planner that draws any arm and any length, so that every path of the engine is met."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def plan(self, view: BatchView) -> Plan:
        """One arm and up to 6 tokens for everyone, as far as they fit."""
        choices, free = [], view.free_kv_tokens
        for request in view.requests:
            choice = Choice.off()
            if request.drafters:
                most = min(self._random.randint(0, 6), request.remaining_tokens - 1, free)
                choice = Choice.of(self._random.choice(request.drafters), max(most, 0))
            free -= choice.num_draft_tokens
            choices.append(choice)
        return Plan(tuple(choices))

    def refine(self, view: BatchView, plan: Plan, confidence: Confidence) -> Plan:
        """Leave it."""
        return plan

    def observe(self, observation: Observation) -> None:
        """Learn nothing."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is decoded."""

    models: Models
    prompts: Texts
    tokens: int

    def generate(self, batch_size: int) -> Texts:
        """By `generate`, in left-padded batches."""
        return [text for batch in self._batches(batch_size) for text in self._generate(batch)]

    def decode(self, batch_size: int, drafters: Sequence[DrafterSpec]) -> Texts:
        """By our engine, with random plans where there are drafters."""
        planner = AnyPlan() if drafters else None
        config = EngineConfig(max_batch_size=batch_size)
        with Engine(
            self.models.target, drafters=drafters, planner=planner, config=config
        ) as engine:
            ids = [
                engine.submit(prompt, max_new_tokens=self.tokens, do_sample=False)
                for prompt in self.prompts
            ]
            finished = engine.run()
        return [finished[request_id].output for request_id in ids]

    def _batches(self, size: int) -> Iterator[Texts]:
        for first in range(0, len(self.prompts), size):
            yield self.prompts[first : first + size]

    def _generate(self, batch: Texts) -> Texts:
        width = max(len(prompt) for prompt in batch)
        padding = [width - len(prompt) for prompt in batch]
        ids = [[0] * pad + prompt for pad, prompt in zip(padding, batch, strict=True)]
        mask = [[0] * pad + [1] * (width - pad) for pad in padding]
        out = self.models.target.generate(
            input_ids=torch.tensor(ids),
            attention_mask=torch.tensor(mask),
            max_new_tokens=self.tokens,
            do_sample=False,
            pad_token_id=0,
        )
        texts: Texts = out[:, width:].tolist()
        return texts


def compared(texts: Texts, reference: Texts) -> tuple[int, int]:
    """How many texts differ, and tokens compared: up to the first difference of each."""
    different = tokens = 0
    for text, expected in zip(texts, reference, strict=True):
        pairs = enumerate(zip(text, expected, strict=True), start=1)
        first = next((place for place, (ours, theirs) in pairs if ours != theirs), None)
        different += first is not None
        tokens += len(expected) if first is None else first
    return different, tokens


def interval(events: int, trials: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a rate."""
    rate, spread = events / trials, _Z * _Z / trials
    middle = (rate + spread / 2) / (1 + spread)
    half = _Z * math.sqrt(rate * (1 - rate) / trials + spread / (4 * trials)) / (1 + spread)
    return max(middle - half, 0.0), middle + half


def arms(case: Case) -> Mapping[str, Callable[[], Texts]]:
    """What is compared with `generate` of each prompt alone."""
    every: list[DrafterSpec] = ["ngram", "sparse_kv:128", case.models.draft]
    return {
        "generate, batch 4": lambda: case.generate(4),
        "generate, batch 16": lambda: case.generate(16),
        "engine, batch 1, off": lambda: case.decode(1, []),
        "engine, batch 16, off": lambda: case.decode(16, []),
        "engine, batch 1, every drafter": lambda: case.decode(1, every),
        "engine, batch 16, every drafter": lambda: case.decode(16, every),
    }


def run(case: Case) -> list[dict[str, object]]:
    """Measure and print every arm."""
    reference = case.generate(1)
    results: list[dict[str, object]] = []
    for name, decode in arms(case).items():
        different, tokens = compared(decode(), reference)
        low, high = interval(different, tokens)
        results.append(
            {
                "arm": name,
                "texts_that_differ": different,
                "texts": len(reference),
                "tokens_compared": tokens,
                "first_differences_per_token": different / tokens,
                "interval_95": [low, high],
            }
        )
        print(
            f"{name:34} {different:4} of {len(reference)} texts differ; first differences per 1000 "
            f"tokens {1000 * different / tokens:6.2f}  ({1000 * low:.2f} to {1000 * high:.2f})",
            flush=True,
        )
    return results


def prompts_of(models: Models, count: int) -> Texts:
    """Held-out prompts of all kinds, tokenized."""
    share = -(-count // len(KINDS))
    texts = [text for kind in KINDS for text in held_out_prompts(kind, share, seed=1)]
    mixed = random.Random(0).sample(texts, count)
    return [list(models.tokenizer(text)["input_ids"]) for text in mixed]


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="bfloat16")
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--models", help="folder with target/, draft/ and tokenizer.json")
    parser.add_argument("--no-write", action="store_true")
    options = parser.parse_args()
    models = load(options.models, getattr(torch, options.dtype))
    results = run(Case(models, prompts_of(models, options.prompts), options.tokens))
    if not options.no_write:
        command = (
            f"python -m benchmarks.divergence --dtype {options.dtype} "
            f"--prompts {options.prompts} --tokens {options.tokens}"
        )
        print(write_results(f"divergence-{options.dtype}", command, results))


if __name__ == "__main__":
    main()
