"""Facts about when things are learnt where the controller's own time weighs."""

import itertools
import pickle
import string
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sdcontrol.core import BatchView, Choice, Hint, Observation, Plan, RequestView, Timing
from sdcontrol.waiting import COSTS, OUTCOMES, Due, Part, Seen, Waiting

KEPT, ANEW = "as a few steps ago: goodput", "goodput"
SOME, MANY = string.ascii_letters[:32], string.ascii_letters[:33]  # requests


def seen_of(
    step: int,
    names: Sequence[str] = ("r",),
    *,
    reason: str = KEPT,
    share: float = 0.1,
    accepted: int = 0,
    faults: tuple[str, ...] = (),
) -> Seen:
    """Two draft tokens each."""
    hints = {"ngram": Hint(8, 5)}
    rows = len(names)
    requests = tuple(RequestView(n, 900, 500, 999, 0.0, ("ngram",), hints) for n in names)
    plan = Plan((Choice.of("ngram", 2),) * rows, reason)
    timing = Timing({}, 1.0 - share, controller_seconds=share)
    view, two = BatchView(step, requests, 1000), (2,) * rows
    came, more = (accepted,) * rows, (accepted + 1,) * rows
    return Seen(Observation(view, plan, two, two, came, more, timing, faults=faults), is_try=False)


def settled(names: Sequence[str] = ("r",), *, share: float = 0.1) -> Waiting:
    """After 30 steps in which the controller took a tenth of the time, and 30 in which it took `share`."""
    waiting = Waiting(8)
    for step in range(60):
        taken = 0.1 if step < 30 else share
        waiting.observe(seen_of(step, names, share=taken), may_rest=True, error=0.0)
    assert waiting.puts_off
    return waiting


@given(
    steps=st.lists(
        st.tuples(st.booleans(), st.sampled_from(["a", "b", "ab", MANY]), st.booleans()),
        max_size=60,
    ),
    error=st.sampled_from([0.0, 0.15, 0.4]),
    share=st.sampled_from([0.0, 0.1]),
)
@settings(max_examples=60, deadline=None)
def test_every_step_is_noted_once_in_order_and_parts_follow_one_another(
    steps: list[tuple[bool, str, bool]], error: float, share: float
) -> None:
    """Whatever comes, nothing is lost, learnt twice, or learnt before it was read."""
    waiting, noted, parts = settled(), list[int](), list[Part]()
    for step, (is_kept, names, has_fault) in enumerate(steps, 60):
        faults = ("plan_raised: x",) if has_fault else ()
        reason = KEPT if is_kept else ANEW
        seen = seen_of(step, tuple(names), reason=reason, share=share, faults=faults)
        due = waiting.observe(seen, may_rest=True, error=error)
        noted += [one.observation.view.step for one in due.notes]
        parts += due.parts
        if has_fault:
            assert noted[-1] == step
            assert "learn outcomes" in due.parts
        assert step - (noted[-1] if noted else 59) <= 8
    assert noted == sorted(set(noted))
    assert len(noted) <= 9 or noted[1:] == list(range(noted[1], noted[-1] + 1))
    for kind in (OUTCOMES, COSTS):
        done = [part for part in parts if part in kind]
        done = done[done.index(kind[0]) if kind[0] in done else len(done) :]  # others begun before
        assert done == list(itertools.islice(itertools.cycle(kind), len(done)))


@pytest.mark.parametrize(("batch", "reason"), [(1, KEPT), (3, KEPT), (8, ANEW)])
def test_a_step_notes_or_learns_a_part_but_not_both(batch: int, reason: str) -> None:
    names = tuple(f"r{row}" for row in range(batch))
    waiting, dues = settled(names), list[Due]()
    for step in range(60, 260):
        seen = seen_of(step, names, reason=reason)
        dues.append(waiting.observe(seen, may_rest=True, error=0.05))
    assert all(len(due.parts) <= 1 and not (due.notes and due.parts) for due in dues)
    done = [part for due in dues for part in due.parts]
    assert {*done} == {*OUTCOMES, *COSTS}
    assert done.count("read outcomes") >= 200 // 24


def test_what_many_requests_teach_is_learnt_in_every_step_and_a_part_of_costs_now_and_then() -> (
    None
):
    waiting = settled(tuple(MANY))
    dues = [
        waiting.observe(seen_of(step, tuple(MANY), reason=ANEW), may_rest=True, error=0.05)
        for step in range(60, 160)
    ]
    assert all(len(due.notes) == 1 for due in dues)
    assert all(tuple(due.parts[:2]) == OUTCOMES for due in dues)
    costs = [part for due in dues for part in due.parts[2:]]
    assert {*costs} == {*COSTS}
    assert len(costs) < 30
    assert max(len(due.parts) for due in dues) == 3
    surprised = waiting.observe(seen_of(160, tuple(MANY), reason=ANEW), may_rest=True, error=0.5)
    assert {*surprised.parts} == {*OUTCOMES, *COSTS}


def test_what_thirty_two_requests_teach_waits_for_three_steps_and_no_step_learns_two_parts() -> (
    None
):
    """Mostly known after four steps, and after eight where costs had their turn between."""
    waiting, noted = settled(tuple(SOME)), list[int]()
    ages = []
    for step in range(60, 160):
        seen = seen_of(step, tuple(SOME), reason=ANEW)
        due = waiting.observe(seen, may_rest=True, error=0.05)
        noted += [one.observation.view.step for one in due.notes]
        assert len(due.parts) <= 1
        if "learn outcomes" in due.parts:
            ages.append(step - noted[0])
            noted.clear()
    assert len(ages) > 20
    assert sorted(ages)[len(ages) // 2] <= 4
    assert max(ages) <= 8


def test_a_step_of_a_few_requests_that_was_planned_anew_does_nothing_else_for_up_to_eight() -> None:
    waiting = settled()
    dues = [
        waiting.observe(seen_of(step, reason=ANEW), may_rest=True, error=0.0)
        for step in range(60, 90)
    ]
    busy = [len(due.notes) for due in dues]
    assert max(busy) == 8
    assert busy.count(0) >= 20
    assert all(due.notes or not due.parts for due in dues)


def test_without_leave_to_rest_every_step_is_noted_and_one_half_is_learnt_at_a_time() -> None:
    """So it is for policies that decide anew in every step: they hear of every step at once."""
    waiting = settled()
    for step in range(60, 200):
        due = waiting.observe(seen_of(step, reason=ANEW), may_rest=False, error=0.05)
        assert [one.observation.view.step for one in due.notes][-1] == step
        assert step == 60 or len(due.notes) == 1
        assert len(due.parts) <= 1


def test_whoever_is_new_is_learnt_of_at_once() -> None:
    waiting = settled()
    assert "s" not in waiting.came
    due = waiting.observe(seen_of(60, ("s",)), may_rest=True, error=0.0)
    assert "learn outcomes" in due.parts
    assert "s" in waiting.came
    due = waiting.observe(seen_of(61, ("s",), reason=ANEW), may_rest=True, error=0.0)
    assert not due.parts  # nothing was begun: what it came to is noted with the next
    due = waiting.observe(seen_of(62, ("s",)), may_rest=True, error=0.0)
    assert len(due.notes) == 2


@pytest.mark.parametrize(
    ("batch", "generated", "draft", "share", "is_urgent"),
    [
        (1, 3, (4, 0), 0.018, True),
        (4, 15, (9, 0), 0.018, True),
        (1, 3, (4, 1), 0.018, False),
        (1, 3, (3, 0), 0.018, False),  # a short draft is often rejected
        (1, 16, (4, 0), 0.018, False),  # much is known already
        (5, 3, (4, 0), 0.018, False),  # planned anew in every step
        (1, 3, (4, 0), 0.025, False),  # it would take too much of the time
    ],
)
def test_a_long_draft_of_a_young_request_that_is_rejected_whole_is_learnt_at_once(
    batch: int, generated: int, draft: tuple[int, int], share: float, is_urgent: bool
) -> None:
    """`draft` is how many tokens were proposed and accepted."""
    length, accepted = draft
    names = tuple("abcde"[:batch])
    waiting = settled(names, share=share)
    waiting.observe(seen_of(60, names, share=share), may_rest=True, error=0.0)
    seen = seen_of(61, names, share=share, accepted=accepted).observation
    requests = tuple(replace(r, generated_tokens=generated) for r in seen.view.requests)
    counts, view = (length,) * batch, replace(seen.view, requests=requests)
    seen = replace(seen, view=view, proposed=counts, drafted=counts)
    due = waiting.observe(Seen(seen, is_try=False), may_rest=True, error=0.0)
    assert (set(OUTCOMES) <= set(due.parts)) == is_urgent
    assert not is_urgent or due.notes


def test_a_surprise_in_costs_is_learnt_in_the_same_step() -> None:
    waiting = settled()
    parts = [
        waiting.observe(seen_of(step), may_rest=True, error=0.3).parts for step in range(60, 80)
    ]
    assert sum(tuple(part) == COSTS for part in parts) >= 9  # in turn with outcomes


@pytest.mark.parametrize(("error", "interval"), [(0.05, 16), (0.2, 8), (0.3, 1)])
def test_costs_are_learnt_less_often_the_better_they_are_predicted(
    error: float, interval: int
) -> None:
    waiting, taught = Waiting(8), []
    for step in range(112):
        due = waiting.observe(seen_of(step, reason=ANEW), may_rest=False, error=error)
        assert len(due.parts) <= 1 or error >= 0.25 or step < 32
        if "judge costs" in due.parts:
            taught.append(step)
    early = [0, 1, 2, 3, 4, 5, 6, 7, 15, 23] if error < 0.25 else list(range(24))
    assert [step for step in taught if step < 24] == early  # at first each is news
    intervals = set(np.diff([step for step in taught if step >= 39]).tolist())
    assert interval in intervals <= {*range(interval, interval + 3)}  # costs may wait for outcomes


@pytest.mark.parametrize(("share", "is_fault"), [(0.1, False), (0.1, True), (0.01, False)])
def test_of_the_first_steps_a_few_outcomes_wait_where_the_controllers_time_weighs(
    share: float, is_fault: bool
) -> None:
    waiting, read = Waiting(8), []
    for step in range(32):
        faults = ("plan_stalled",) if is_fault and step == 13 else ()
        seen = seen_of(step, reason=ANEW, share=share, faults=faults)
        due = waiting.observe(seen, may_rest=True, error=0.0)
        assert list(due.notes) == [seen]
        assert tuple(due.parts) in ((), OUTCOMES, COSTS, (*OUTCOMES, *COSTS))
        if "read outcomes" in due.parts:
            read.append(step)
    late = [13, 17, 21, 25, 29] if is_fault else [15, 19, 23, 27]
    assert read == (list(range(32)) if share < 0.02 else [*range(8), 11, *late])


def test_a_pickled_copy_goes_on_as_its_original_would() -> None:
    """Pickled at any step, whichever half had the last turn."""
    names = [f"r{row}" for row in range(12)]
    original, copies = settled(names), list[Waiting]()
    for step in range(60, 140):
        if step < 100:
            copies.append(pickle.loads(pickle.dumps(original)))  # noqa: S301  (our own)
        seen = seen_of(step, names)
        due = original.observe(seen, may_rest=True, error=0.15)
        for one in copies:
            assert one.observe(seen, may_rest=True, error=0.15).parts == due.parts


def test_costs_are_learnt_although_something_is_urgent_in_every_step() -> None:
    """As where each request is done in a step or two: every one of them is new."""
    waiting, parts = settled(), list[Part]()
    for step in range(60, 92):
        parts += waiting.observe(seen_of(step, [f"r{step}"]), may_rest=True, error=0.0).parts
    assert [part for part in parts if part in COSTS] == [*COSTS] * 2


@pytest.mark.parametrize("steps_of_a_text", [1, 20])
def test_costs_are_learnt_where_steps_are_counted_anew_or_not_at_all(steps_of_a_text: int) -> None:
    waiting, parts = Waiting(8), list[Part]()
    for step in range(120):
        seen = seen_of(step % steps_of_a_text)
        due = waiting.observe(seen, may_rest=True, error=0.0)
        parts += due.parts if step >= 60 else ()
    assert waiting.puts_off
    assert 2 <= parts.count("learn forwards") <= 8


def test_what_is_urgent_is_learnt_and_costs_that_were_begun_stay_for_later() -> None:
    waiting = settled()
    step = next(
        s
        for s in range(60, 160)
        if "judge costs" in waiting.observe(seen_of(s), may_rest=True, error=0.0).parts
    )
    due = waiting.observe(seen_of(step + 1, faults=("verifier",)), may_rest=True, error=0.0)
    assert tuple(due.parts) == OUTCOMES
    rest = [waiting.observe(seen_of(step + s), may_rest=True, error=0.0).parts for s in (2, 3)]
    assert [tuple(parts) for parts in rest] == [("learn forwards",), ("learn rounds",)]


def test_drafts_as_long_as_can_be_that_are_accepted_whole_wait_for_longer() -> None:
    """Nothing that is learnt of them could change what a request is given."""

    def most_waiting(most_draft_tokens: int) -> int:
        waiting, last, most = Waiting(most_draft_tokens), 0, 0
        for step in range(200):
            due = waiting.observe(seen_of(step, accepted=2), may_rest=False, error=0.0)
            last = step if "read outcomes" in due.parts else last
            most = max(most, step - last)
        return most

    assert 15 <= most_waiting(2) <= 17
    assert 7 <= most_waiting(8) <= 10  # after costs that were begun
