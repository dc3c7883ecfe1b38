"""Arms take turns: in every block each runs the block's phases once, in random order.

Before, the learned policy is trained. A first block warms up and is not counted. After every odd block
arms go that odd blocks so far show to be behind; how near they came is kept. Even blocks drop nobody:
they score. Rivals of a workload start after block 1, with the drafter that it shows to be the best,
and a warm-up and a block 1 of their own.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from benchmarks.regret.arms import (
    SCHEDULE,
    Spec,
    fixed_specs,
    outclassed,
    rival_specs,
    schedule_spec,
)
from benchmarks.regret.grid import Case
from benchmarks.regret.rig import Arm, Rig, Run
from benchmarks.regret.scoring import ADAPTIVE, LEARNED, OFF, OURS
from benchmarks.regret.training import trained_model
from sdcontrol.policies.learned import Learned

__all__ = ["Turns", "take_turns"]


@dataclass(slots=True)
class Turns:
    """What was measured: by arm, its counted blocks; a block is a run per phase."""

    fixed: list[str]  # all that began, off first
    arms: dict[str, Arm]  # those that are still in
    runs: dict[str, list[list[Run]]] = field(default_factory=dict)
    dropped: dict[str, float] = field(default_factory=dict)  # the most of the best's rate it had
    compared_texts: int = 0
    differing_texts: int = 0

    def rates(self) -> dict[str, list[list[float]]]:
        """Tokens per second by arm, block and phase, of the arms that are still in."""
        return {
            name: [[run.rate for run in block] for block in blocks]
            for name, blocks in self.runs.items()
            if name in self.arms
        }

    @property
    def fixed_left(self) -> list[str]:
        """Fixed settings that are still in."""
        return [name for name in self.fixed if name in self.arms]

    @property
    def rivals(self) -> list[str]:
        """Arms that are neither fixed nor ours."""
        return [name for name in self.arms if name not in (*self.fixed, *OURS)]


def take_turns(
    rig: Rig, *, blocks: int, seed: int = 0, on_block: Callable[[int], None] = lambda block: None
) -> Turns:
    """Measure all arms of the rig's case over `blocks` counted blocks."""
    case, rng = rig.case, random.Random(seed)
    specs = {**fixed_specs(case), ADAPTIVE: ADAPTIVE, LEARNED: Learned(trained_model(rig))}
    turns = Turns(list(fixed_specs(case)), _arms(specs))
    for block in range(blocks + 1):
        names = rng.sample(list(turns.arms), len(turns.arms))
        _count(turns, block, {name: _run_block(rig, turns.arms[name], block) for name in names})
        if block % 2:
            _drop_outclassed(turns, case)
        if block == 1 and case.is_workload:
            _start_rivals(turns, rig)
            _drop_outclassed(turns, case)
        elif block % 2 and SCHEDULE in turns.arms:
            drafter = str(turns.arms[SCHEDULE].controller.policy.drafter)  # type: ignore[attr-defined]  # this policy has one
            turns.arms |= _arms({SCHEDULE: schedule_spec(turns.rates(), case, drafter)})
        on_block(block)
    return turns


def _arms(specs: Mapping[str, Spec]) -> dict[str, Arm]:
    return {name: Arm(name, spec) for name, spec in specs.items()}


def _run_block(rig: Rig, arm: Arm, block: int) -> list[Run]:
    """What does not learn is warm after a few tokens."""
    is_short = not block and not arm.controller.learns
    tokens = max(rig.case.tokens // 4, 2) if is_short else rig.case.tokens
    return [rig.run(arm, phase, block, tokens=tokens) for phase in rig.case.phases_of(block)]


def _count(turns: Turns, block: int, measured: Mapping[str, list[Run]]) -> None:
    if not block:
        return
    for name, runs in measured.items():
        turns.runs.setdefault(name, []).append(runs)
    plain = turns.runs[OFF][block - 1]
    for name, runs in measured.items():
        for run, reference in zip(runs, plain, strict=True) if name != OFF else ():
            for text, other in zip(run.outputs, reference.outputs, strict=True):
                most = min(len(text), len(other))
                turns.compared_texts += 1
                turns.differing_texts += text[:most] != other[:most]


def _start_rivals(turns: Turns, rig: Rig) -> None:
    rivals = _arms(rival_specs(turns.rates(), rig.case, turns.fixed_left))
    turns.arms |= rivals
    for arm in rivals.values():
        _run_block(rig, arm, 0)
        _count(turns, 1, {arm.name: _run_block(rig, arm, 1)})


def _drop_outclassed(turns: Turns, case: Case) -> None:
    shares = outclassed(turns.rates(), case, turns.fixed_left, turns.rivals)
    turns.dropped |= shares
    turns.arms = {name: arm for name, arm in turns.arms.items() if name not in shares}
