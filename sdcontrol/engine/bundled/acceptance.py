"""How many tokens each drafter brings on each kind of held-out prompt, measured by the engine.

python -m sdcontrol.engine.bundled.acceptance
"""

import argparse
from collections.abc import Sequence

import torch

from sdcontrol.core import BatchView, Confidence, Observation, Plan
from sdcontrol.engine.bundled import KINDS, held_out_prompts, load_bundled, load_bundled_tokenizer
from sdcontrol.engine.loop import Engine

__all__ = ["acceptance_length", "main"]

ARMS = ("ngram", "draft_model", "sparse_kv:128", "sparse_kv:128:scored")


class _Always:
    """Plans the same for everyone."""

    def __init__(self, arm: str, num_draft_tokens: int) -> None:
        self._arm = arm
        self._num_draft_tokens = num_draft_tokens

    def plan(self, view: BatchView) -> Plan:
        return Plan.uniform(view, self._arm, self._num_draft_tokens)

    def refine(self, view: BatchView, plan: Plan, confidence: Confidence) -> Plan:
        return plan

    def observe(self, observation: Observation) -> None:
        pass


def acceptance_length(
    arm: str, prompts: Sequence[Sequence[int]], *, draft_tokens: int = 4, new_tokens: int = 128
) -> tuple[float, float]:
    """Tokens per verification, the bonus token included, and accepted per draft token."""
    target, draft = (load_bundled(name, dtype=torch.float32) for name in ("target", "draft"))
    drafter = draft if arm == "draft_model" else arm
    with Engine(target, drafters=[drafter], planner=_Always(arm, draft_tokens)) as engine:
        for prompt in prompts:
            engine.submit(prompt, max_new_tokens=new_tokens, do_sample=False)
        engine.run()
        stats = engine.stats.drafters[arm]
    return stats.acceptance_length, stats.acceptance_rate


def main() -> None:
    """Print the table of the model card."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--prompts", type=int, default=24, help="prompts of each kind")
    options = parser.parse_args()
    tokenizer = load_bundled_tokenizer()
    print(f"| kind | {' | '.join(ARMS)} |\n|---|{'---|' * len(ARMS)}")
    for kind in KINDS:
        texts = held_out_prompts(kind, options.prompts, min_tokens=200)
        prompts = [list(tokenizer(text)["input_ids"]) for text in texts]
        cells = [acceptance_length(arm, prompts) for arm in ARMS]
        print(
            f"| {kind} | {' | '.join(f'{n:.2f} ({rate:.2f})' for n, rate in cells)} |", flush=True
        )


if __name__ == "__main__":
    main()
