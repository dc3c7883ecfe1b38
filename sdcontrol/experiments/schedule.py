"""Who runs when: the order of arms in every block, which blocks have an A/A run, what is warm-up.

A function of the settings, the block's number and, for warm-up, of what blocks measured: an
interrupted run goes on with the same order and seeds. Knows nothing of engines or prompts.

Warm-up, by rule: the first `min_blocks` blocks; then blocks whose two runs of the baseline differ
by more than `tolerance` (log ratio of tokens per second), until the first that do not; never more
than `max_blocks`. It is decided block by block, before any counted one, by the baseline alone.
"""

import math
import random
from collections.abc import Sequence

from sdcontrol.experiments.config import Experiment
from sdcontrol.experiments.records import BlockRecord, RunRecord

__all__ = ["Turn", "block_seed", "is_warmup", "turns"]

Turn = tuple[str, bool]
"""An arm, and whether it is the baseline's second run."""


def block_seed(experiment: Experiment, block: int, purpose: str) -> int:
    """A number for this block and purpose, the same at every try."""
    return random.Random(f"{experiment.seed} {block} {purpose}").getrandbits(31)


def turns(experiment: Experiment, before: Sequence[BlockRecord]) -> list[Turn]:
    """The runs of the next block, in random order; the baseline's second comes after its first.

    Whether there is a second run does not change the order of the others.
    """
    block = len(before)
    rng = random.Random(block_seed(experiment, block, "order"))
    order = rng.sample([(arm.name, False) for arm in experiment.arms], len(experiment.arms))
    num_counted = sum(not record.is_warmup for record in before)
    every = experiment.repeat_every
    if _may_be_warmup(experiment, before) or (every and num_counted % every == 0):
        first = order.index((experiment.reference, False))
        order.insert(rng.randint(first + 1, len(order)), (experiment.reference, True))
    return order


def is_warmup(
    experiment: Experiment, before: Sequence[BlockRecord], runs: Sequence[RunRecord]
) -> bool:
    """Whether the block that had these runs is dropped; blocks `before` it are in order."""
    if len(before) < experiment.warmup.min_blocks:
        return True
    if not _may_be_warmup(experiment, before):
        return False
    rates = [
        run.metrics.get("tokens_per_second", 0.0)
        for run in runs
        if run.arm == experiment.reference and not run.failed
    ]
    if len(rates) < 2 or min(rates) <= 0:
        return False
    return abs(math.log(rates[1] / rates[0])) > experiment.warmup.tolerance


def _may_be_warmup(experiment: Experiment, before: Sequence[BlockRecord]) -> bool:
    is_warming = not before or before[-1].is_warmup
    return is_warming and len(before) < experiment.warmup.max_blocks
