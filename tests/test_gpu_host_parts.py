"""Facts about where the host's time of a step is said to go: parts within their whole, and nothing left behind."""

import pytest
import torch

from benchmarks.gpu.acceptance import MIXES, seeds_of
from benchmarks.gpu.all_drafters import open_decoder
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.host_parts import HostParts, watched
from benchmarks.gpu.scale import SMALL
from benchmarks.regret.rig import Arm
from sdcontrol.engine.batch import Batch
from sdcontrol.engine.loop import Engine

BATCH, CONTEXT, STEPS = 2, 64, 6


def turned(spec: str) -> HostParts:
    """The parts of a watched turn, after one that is not."""
    decoder = open_decoder(Bench(SMALL, torch.device("cpu")), BATCH, CONTEXT)
    arm, seeds, parts = Arm(spec, spec), seeds_of(MIXES["mixed"], BATCH, 1), HostParts()
    try:
        decoder.turn(arm, steps=STEPS, seeds=seeds)
        with watched(parts):
            turn = decoder.turn(arm, steps=STEPS, seeds=seeds)
    finally:
        decoder.close()
    assert len(turn.step_seconds) == STEPS
    assert sum(parts.values()) < 3e6 * max(turn.step_seconds), "microseconds, of a step each"
    return parts


def test_parts_of_a_step_that_drafts_lie_within_their_wholes() -> None:
    parts = turned("static:ngram:4")
    assert {"view", "plan", "draft", "forward", "wait for verdicts", "observe"} <= parts.keys()
    for whole in ("view", "commit"):
        inner = [seconds for name, seconds in parts.items() if name.startswith(f"{whole}: ")]
        assert inner
        assert 0.0 < sum(inner) < parts[whole]
    assert parts["forward"] == max(parts.values()), "on a CPU it computes"


def test_parts_that_nobody_calls_are_left_out() -> None:
    parts = turned("off")
    assert "view: offers" not in parts
    assert "forward: launch" not in parts  # no graph on a CPU


def test_nothing_is_watched_any_more_whatever_happens() -> None:
    before = Engine.step, Engine._ask, Batch.view
    with pytest.raises(ZeroDivisionError):
        fail_while_watched(before[0])
    assert before == (Engine.step, Engine._ask, Batch.view)


def fail_while_watched(step: object) -> None:
    with watched(HostParts()):
        assert Engine.step is not step
        raise ZeroDivisionError
