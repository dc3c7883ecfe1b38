"""Decode real prompts with the bundled models under several policies, and show what came of it.

    python -m sdcontrol.experiments.demo [--blocks N] [--output runs/demo]

Every block is one mixed batch of held-out prompts, decoded by every arm in turn. The first block
warms up and is not counted. Texts are compared token for token.
"""

import argparse
import json
import platform
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import LlamaForCausalLM

from sdcontrol.controller import Controller
from sdcontrol.engine.bundled import KINDS, held_out_prompts, load_bundled, load_bundled_tokenizer
from sdcontrol.engine.loop import Engine
from sdcontrol.engine.stats import EngineStats
from sdcontrol.experiments.compare import Ratio, paired_ratio
from sdcontrol.experiments.report import ArmFacts, RunFacts, write_report

__all__ = ["main"]

DRAFTERS = ("ngram", "sparse_kv:128")
ARMS: Mapping[str, str] = {
    "off": "no speculation",
    "static:ngram:4": "fixed: n-gram, 4 tokens",
    "static:draft_model:3": "fixed: draft model, 3 tokens",
    "goodput": "adaptive",
}


@dataclass(slots=True)
class Arm:
    """One policy with an engine of its own, and what it did."""

    policy: str
    engine: Engine
    seconds: list[float] = field(default_factory=list)  # per counted block
    tokens: list[int] = field(default_factory=list)

    @property
    def rates(self) -> list[float]:
        """Output tokens per second, by block."""
        return [tokens / spent for tokens, spent in zip(self.tokens, self.seconds, strict=True)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demonstration; 0 if every arm wrote the same text."""
    options = _parser().parse_args(arguments)
    console = Console()
    target = load_bundled("target", dtype=torch.float32)
    draft = load_bundled("draft", dtype=torch.float32)
    console.print(
        f"Target {_millions(target)} M parameters, draft model {_millions(draft)} M, "
        f"{torch.get_num_threads()} threads, float32, batches of {len(KINDS)} kinds of prompt."
    )
    arms = [
        Arm(policy, Engine(target, drafters=[*DRAFTERS, draft], planner=Controller(policy)))
        for policy in ARMS
    ]
    differing = _decode_blocks(arms, options)
    ratios = {arm.policy: paired_ratio(arm.rates, arms[0].rates) for arm in arms}
    console.print(_table(arms, ratios))
    console.print(_verdict(arms, ratios, differing))
    written = _write(Path(options.output), arms, ratios, differing)
    console.print(f"Report: {written}")
    return 1 if differing else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--blocks", type=int, default=7, help="counted blocks (default: 7)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens per prompt (default: 128)")
    parser.add_argument("--output", default="runs/demo", help="folder for the report")
    return parser


def _decode_blocks(arms: Sequence[Arm], options: argparse.Namespace) -> int:
    """Decode every block with every arm, in random order; how many texts differ from the first's."""
    tokenizer = load_bundled_tokenizer()
    rng = random.Random(0)
    differing = 0
    for block in track(range(options.blocks + 1), description="decoding"):
        prompts = [held_out_prompts(kind, 1, seed=block)[0] for kind in KINDS]
        batch = [list(tokenizer(prompt)["input_ids"]) for prompt in prompts]
        texts: dict[str, list[tuple[int, ...]]] = {}
        for arm in rng.sample(arms, len(arms)):
            started = time.perf_counter()
            texts[arm.policy] = _decode(arm.engine, batch, options.tokens)
            if block:
                arm.seconds.append(time.perf_counter() - started)
                arm.tokens.append(sum(map(len, texts[arm.policy])))
        differing += sum(
            text != reference
            for policy in texts
            for text, reference in zip(texts[policy], texts[arms[0].policy], strict=True)
        )
    return differing


def _decode(
    engine: Engine, batch: Sequence[Sequence[int]], num_tokens: int
) -> list[tuple[int, ...]]:
    ids = [engine.submit(p, max_new_tokens=num_tokens, do_sample=False) for p in batch]
    finished = engine.run()
    engine.take_events()
    return [tuple(finished[request_id].output) for request_id in ids]


def _table(arms: Sequence[Arm], ratios: Mapping[str, Ratio]) -> Table:
    table = Table(title="Output tokens per second against no speculation")
    table.add_column("policy", no_wrap=True)
    for column in ("speed", "95 % interval", "tokens/step", "drafted by, accepted"):
        table.add_column(column, justify="right", no_wrap=column == "speed")
    for arm in arms:
        ratio, stats = ratios[arm.policy], arm.engine.stats
        table.add_row(
            arm.policy,
            f"{ratio.median:.2f}x",
            f"{ratio.low:.2f} to {ratio.high:.2f}",
            f"{stats.tokens_per_step:.2f}",
            _drafters(stats),
        )
    return table


def _drafters(stats: EngineStats) -> str:
    """How often each arm drafted, and the share of its tokens that was accepted."""
    used = [(name, drafter) for name, drafter in stats.drafters.items() if drafter.steps]
    return "\n".join(f"{name} {d.steps}x, {d.acceptance_rate:.0%}" for name, d in used) or "-"


def _verdict(arms: Sequence[Arm], ratios: Mapping[str, Ratio], differing: int) -> str:
    adaptive = ratios["goodput"]
    fixed = max((a for a in arms if a.policy != "goodput"), key=lambda a: ratios[a.policy].median)
    against = paired_ratio(next(a for a in arms if a.policy == "goodput").rates, fixed.rates)
    same = (
        "Every policy wrote the same text, token for token."
        if not differing
        else f"{differing} texts differ from those without speculation."
    )
    return (
        f"The adaptive policy ran at {adaptive} of no speculation, and at {against} of the best "
        f"fixed setting here ({fixed.policy}, known only afterwards). {same}"
    )


def _write(folder: Path, arms: Sequence[Arm], ratios: Mapping[str, Ratio], differing: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    facts: RunFacts = {
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "differing_texts": differing,
        "verdict": _verdict(arms, ratios, differing),
        "arms": [_arm_facts(arm, ratios[arm.policy]) for arm in arms],
    }
    (folder / "results.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")
    return write_report(folder / "report.html", facts)


def _arm_facts(arm: Arm, ratio: Ratio) -> ArmFacts:
    stats = arm.engine.stats
    return {
        "policy": arm.policy,
        "description": ARMS[arm.policy],
        "speed": ratio.to_dict(),
        "tokens_per_second": arm.rates,
        "tokens_per_step": stats.tokens_per_step,
        "seconds": stats.seconds,
        "lengths": {
            f"{name} {length}" if length else name: count
            for (name, length), count in sorted(stats.lengths.items())
        },
    }


def _millions(model: LlamaForCausalLM) -> str:
    return f"{sum(parameter.numel() for parameter in model.parameters()) / 1e6:.1f}"


if __name__ == "__main__":
    raise SystemExit(main())
