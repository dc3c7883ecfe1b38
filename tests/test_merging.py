"""Several steps learnt at once are learnt as one by one."""

from dataclasses import replace

import numpy as np
import pytest

from sdcontrol.columns import (
    ACCEPTED,
    ARM,
    NOBODY,
    PROPOSED,
    SHADOWS,
    read_steps,
    said_of,
    sorted_out,
)
from sdcontrol.controller import Controller
from sdcontrol.core import BatchView, Choice, Hint, Observation, Plan, RequestView, Timing
from sdcontrol.errors import ObservationError
from sdcontrol.estimators.acceptance import AcceptanceEstimator
from sdcontrol.estimators.merging import accepted_nodes, confidences, typical

ARMS = ("ngram", "draft_model")


def step_of(rng: np.random.Generator, step: int, ids: str, *, has_trees: bool) -> Observation:
    """A step of these requests, whose drafts and outcomes are drawn."""
    requests = tuple(
        RequestView(
            name, 100 + step, step, 500, 0.0, ARMS, {"ngram": Hint(8, int(rng.integers(0, 9)))}
        )
        for name in ids
    )
    view = BatchView(step, requests, 1000, int(rng.integers(0, 2)))
    arm = "ngram" if has_trees else "draft_model"
    lengths = tuple(int(rng.integers(1, 5)) for _ in ids)
    accepted = tuple(int(rng.integers(0, n + 1)) for n in lengths)
    trees = [
        tuple(sorted(rng.permutation(n)[:k].tolist()))
        for n, k in zip(lengths, accepted, strict=True)
    ]
    said = [tuple(rng.random(n).tolist()) for n in lengths]
    return Observation(
        view,
        Plan(tuple(Choice.of(arm, n) for n in lengths)),
        lengths,
        lengths,
        accepted,
        tuple(n + 1 for n in accepted),
        Timing({}, 0.01, 0.0, 0.0),
        accepted_nodes=tuple(trees) if has_trees else None,
        confidence=None if has_trees else tuple(said),
        shadow={} if has_trees else {"ngram": tuple(int(rng.integers(0, n + 2)) for n in accepted)},
    )


def test_several_steps_are_read_as_one_with_every_request_in_order() -> None:
    rng = np.random.default_rng(1)
    steps = [step_of(rng, n, ids, has_trees=n % 2 == 0) for n, ids in enumerate(("ab", "abc", "c"))]
    said, outcomes = read_steps(steps)
    requests = [request for step in steps for request in step.view.requests]
    context, _, _, matches, _, _ = sorted_out(said.values, *said.is_allowed.shape)
    assert context.tolist() == [request.context_tokens for request in requests]
    assert matches[0].tolist() == [request.hints["ngram"].match_tokens for request in requests]
    assert outcomes.table[ACCEPTED].tolist() == [n for step in steps for n in step.accepted]
    assert outcomes.table[PROPOSED].tolist() == [n for step in steps for n in step.proposed]
    arms = [choice.drafter for step in steps for choice in step.plan.choices]
    assert [outcomes.arms[arm] for arm in outcomes.table[ARM]] == arms
    assert [outcomes.arms[arm] for arm in outcomes.shadows] == ["ngram"]
    known = [NOBODY if n is None else n for n in steps[1].shadow["ngram"]]
    assert outcomes.table[SHADOWS].tolist() == [NOBODY, NOBODY, *known, NOBODY]
    said_of_tokens, nodes = confidences(steps), accepted_nodes(steps)
    assert said_of_tokens is not None
    assert [len(row) for row in said_of_tokens] == [0, 0, *steps[1].proposed, 0]
    assert [tuple(path) for path in nodes[2:5]] == [tuple(range(n)) for n in steps[1].accepted]
    assert read_steps(steps[:1])[0] is said_of(steps[0].view)


def test_views_that_were_read_are_put_side_by_side_as_if_read_together() -> None:
    """Whatever their hints speak of, and who may use what; also where one of them was not read."""
    rng = np.random.default_rng(4)
    for batches in (("ab", "abc", "c"), ("ab", "", "c"), ("", "")):
        for kind in ("alike", "of other arms", "of other things"):
            for unread in (False, True):
                steps = [step_of(rng, n, ids, has_trees=False) for n, ids in enumerate(batches)]
                steps = [_varied(step, kind) for step in steps]
                together, _ = read_steps(steps)
                for step in steps[unread:]:
                    said_of(step.view)
                said, _ = read_steps(steps)
                assert said is not together
                assert (said.arms, said.says) == (together.arms, together.says)
                assert said.kv_tokens == together.kv_tokens
                assert np.array_equal(said.values, together.values, equal_nan=True)
                assert np.array_equal(said.is_allowed, together.is_allowed)
                assert said.is_allowed.flags.c_contiguous
                assert said.values.flags.c_contiguous


def _varied(step: Observation, kind: str) -> Observation:
    """The same step, of whose requests every second one is offered, or told, something else."""

    def varied(row: int, request: RequestView) -> RequestView:
        if kind == "alike" or (row + step.view.step) % 2:
            return request
        if kind == "of other arms":
            return replace(request, drafters=ARMS[::-1], hints={})
        return replace(request, hints={"draft_model": Hint(confidence=0.5, catch_up_tokens=3)})

    requests = [varied(row, request) for row, request in enumerate(step.view.requests)]
    return replace(step, view=replace(step.view, requests=tuple(requests)))


def test_a_request_that_comes_often_has_one_place() -> None:
    rng = np.random.default_rng(2)
    estimator = AcceptanceEstimator()
    steps = [step_of(rng, n, "a", has_trees=False) for n in range(4)]
    estimator.update_all(steps)
    new = steps[0].view
    estimator.update(step_of(rng, 5, "b", has_trees=False))
    assert len({int(slot) for slot in estimator._requests.slots(new)}) == 1
    assert len(estimator._requests._slot_of) == 2


def test_learning_at_once_comes_near_to_learning_one_by_one() -> None:
    """Averages follow one step later; what a request deviates by is tracked outcome by outcome."""
    rng = np.random.default_rng(3)
    at_once, one_by_one = AcceptanceEstimator(), AcceptanceEstimator()
    for turn in range(40):
        steps = [step_of(rng, 4 * turn + n, "ab", has_trees=False) for n in range(4)]
        at_once.update_all(steps)
        for step in steps:
            one_by_one.update(step)
    view = steps[-1].view
    for arm in ARMS:
        expected = one_by_one.survival(view)[arm]
        assert at_once.survival(view)[arm] == pytest.approx(expected, abs=0.06)


def test_an_observation_that_does_not_fit_its_view_is_refused_at_once_and_loses_nothing() -> None:
    rng = np.random.default_rng(4)
    controller = Controller("goodput", clock=None)
    good = step_of(rng, 0, "ab", has_trees=False)
    bad = Observation(
        good.view, good.plan, good.drafted, good.proposed, (1,), good.emitted, good.timing
    )
    with pytest.raises(ObservationError, match="1 entries in accepted for 2 requests"):
        controller.observe(bad)
    assert controller.num_observed == 0
    controller.observe(good)
    assert controller.num_observed == 1


def test_the_typical_step_is_one_of_median_time_among_the_last_of_the_same_work() -> None:
    rng = np.random.default_rng(6)
    one = step_of(rng, 0, "ab", has_trees=False)
    other = replace(one, proposed=(0, 0), drafted=(0, 0))

    def timed(step: Observation, seconds: float) -> Observation:
        return replace(step, timing=Timing({}, seconds, 0.0, 0.0))

    slow = [timed(one, 9.0)] * 20
    steps = [*slow, *[timed(one, seconds) for seconds in (3.0, 1.0, 4.0, 1.5, 5.0, 9.0, 2.0)]]
    assert typical(steps).timing.verify_seconds == 3.0
    assert typical([*steps, timed(other, 0.1)]).timing.verify_seconds == 0.1
    assert typical([timed(other, 0.1), *slow[:2]]) is slow[0]
