"""Facts about choices that stand for other steps: for whom, for how long, for which hints."""

from collections.abc import Mapping, Sequence

import pytest

from sdcontrol.core import BatchView, Choice, Hint, Plan, RequestView
from sdcontrol.kept_choices import KeptChoices, is_kept

ARMS = ("ngram", "draft_model")
LOOK_UP, MODEL = Choice.of("ngram", 8), Choice.of("draft_model", 2)


def view_of(
    step: int, hints: Sequence[Hint], *, name: str = "r", generated: int = 500, remaining: int = 999
) -> BatchView:
    """Requests of which the n-gram drafter says `hints`."""
    requests = tuple(
        RequestView(f"{name}{r}", 900, generated, remaining, 0.0, ARMS, {"ngram": hint})
        for r, hint in enumerate(hints)
    )
    return BatchView(step, requests, 1000)


class Memory:
    """Choices of which `keep` also takes note that the requests were observed."""

    def __init__(self) -> None:
        self._came: set[str] = set()
        self.choices = KeptChoices(8, self._came)

    def keep(self, view: BatchView, *choices: Choice) -> None:
        self.choices.keep(view, Plan(choices, "goodput: because"))
        self._came.update(request.id for request in view.requests)

    def pass_steps(self, count: int) -> None:
        for _ in range(count):
            self.choices.pass_step()

    def given(self, view: BatchView) -> tuple[Choice, ...] | None:
        plan = self.choices.repeated(view)
        if plan is None:
            return None
        plan.check(view)
        assert is_kept(plan)
        assert plan.reason.endswith("goodput: because")
        return plan.choices


def known(step: int, hint: Hint, choice: Choice) -> Memory:
    """A memory of one request that was given `choice`, once it was known."""
    memory = Memory()
    memory.keep(view_of(step, [hint], name="other"), choice)
    memory._came.add("r0")
    memory.choices.keep(view_of(step, [hint]), Plan((choice,), "goodput: because"))
    return memory


@pytest.mark.parametrize(
    ("then", "choice", "now", "given"),
    [
        (Hint(8, 5), LOOK_UP, Hint(8, 5), LOOK_UP),
        (Hint(8, 5), LOOK_UP, Hint(8, 4), LOOK_UP),  # the same bucket
        (Hint(8, 5), LOOK_UP, Hint(8, 3), None),  # shorter
        (Hint(8, 5), LOOK_UP, Hint(8, 30), LOOK_UP),  # longer, and it had as much as could be had
        (Hint(8, 5), Choice.of("ngram", 3), Hint(8, 30), None),
        (Hint(8, 5), Choice.of("ngram", 3), Hint(4, 5), Choice.of("ngram", 3)),
        (Hint(8, 5), Choice.of("ngram", 3), Hint(2, 5), Choice.of("ngram", 2)),
        (Hint(4, 5), Choice.of("ngram", 3), Hint(8, 5), Choice.of("ngram", 3)),
        (Hint(4, 5), Choice.of("ngram", 4), Hint(8, 5), None),  # what was on offer ended it
        (Hint(4, 5), Choice.of("ngram", 4), Hint(0, 5), None),
        (Hint(8, 5), MODEL, Hint(4, 5), MODEL),
        (Hint(4, 5), MODEL, Hint(8, 5), None),  # more of what was not taken
        (Hint(0, 0), MODEL, Hint(8, 1), None),
        (Hint(8, 1), Choice.off(), Hint(8, 8), None),  # longer
    ],
)
def test_a_choice_stands_for_offers_that_are_about_worth_the_same(
    then: Hint, choice: Choice, now: Hint, given: Choice | None
) -> None:
    memory = known(10, then, choice)
    assert memory.given(view_of(11, [now])) == (None if given is None else (given,))


def test_what_is_given_to_shorter_and_about_to_longer_matches_is_given_to_those_between() -> None:
    memory, three = known(10, Hint(8, 2), Choice.of("ngram", 3)), Choice.of("ngram", 3)
    memory.keep(view_of(11, [Hint(8, 13)]), Choice.of("ngram", 5))
    memory.keep(view_of(12, [Hint(8, 30)]), LOOK_UP)
    assert memory.given(view_of(13, [Hint(8, 5)])) == (three,)
    assert memory.given(view_of(13, [Hint(6, 5)])) == (three,)
    assert memory.given(view_of(13, [Hint(8, 1)])) is None
    assert memory.given(view_of(13, [Hint(8, 23)])) is None  # a longer one was given more


def test_a_choice_stands_for_32_steps_and_one_of_a_request_that_has_just_come_until_it_is_learnt() -> (
    None
):
    memory = known(10, Hint(8, 5), LOOK_UP)
    memory.choices.outdate()
    memory.pass_steps(32)
    assert memory.given(view_of(42, [Hint(8, 5)])) == (LOOK_UP,)
    memory.pass_steps(1)
    assert memory.given(view_of(43, [Hint(8, 5)])) is None
    young = view_of(50, [Hint(8, 5)], generated=2)
    memory.keep(young, LOOK_UP)
    memory.pass_steps(49)
    assert memory.given(view_of(99, [Hint(8, 5)])) == (LOOK_UP,)
    memory.choices.outdate()
    assert memory.given(view_of(51, [Hint(8, 5)])) is None


def test_steps_are_those_observed_whatever_an_engine_counts() -> None:
    memory = known(1000, Hint(8, 5), LOOK_UP)
    memory.choices.outdate()
    memory.pass_steps(1)
    assert memory.given(view_of(9000, [Hint(8, 5)])) == (LOOK_UP,)  # other arms had their turn
    memory.pass_steps(32)
    assert memory.given(view_of(3, [Hint(8, 5)])) is None  # an engine that is new


def test_a_new_request_gets_what_others_got_in_their_first_step_and_then_its_own() -> None:
    memory = Memory()
    memory.keep(view_of(1, [Hint(8, 5)], name="first", generated=1), LOOK_UP)
    memory.choices.outdate()
    second = view_of(9, [Hint(8, 5)], name="second", generated=1)
    assert memory.given(second) == (LOOK_UP,)
    memory._came.add("second0")
    assert memory.given(view_of(10, [Hint(8, 5)], name="second", generated=3)) is None


def test_nothing_stands_for_other_batch_sizes_larger_batches_prompts_or_other_confidences() -> None:
    memory = Memory()
    hint = Hint(8, 5)
    memory.keep(view_of(1, [hint] * 2), LOOK_UP, LOOK_UP)
    memory._came.clear()
    assert memory.given(view_of(2, [hint] * 2)) == (LOOK_UP, LOOK_UP)
    assert memory.given(view_of(2, [hint])) is None
    memory.keep(view_of(3, [hint] * 5), *[LOOK_UP] * 5)
    assert memory.given(view_of(4, [hint] * 5)) is None
    beside = BatchView(4, view_of(4, [hint] * 2).requests, 1000, prefill_tokens=9)
    memory._came.clear()
    assert memory.given(beside) is None
    sure = known(1, Hint(8, None, 0.9), LOOK_UP)
    assert sure.given(view_of(2, [Hint(8, None, 0.9)])) == (LOOK_UP,)
    assert sure.given(view_of(2, [Hint(8, None, 0.8)])) is None


def test_a_kept_choice_heeds_what_remains_and_the_room_that_is_left() -> None:
    memory = known(1, Hint(8, 5), LOOK_UP)
    assert memory.given(view_of(2, [Hint(8, 5)], remaining=4)) == (Choice.of("ngram", 3),)
    assert memory.given(view_of(2, [Hint(8, 5)], remaining=1)) == (Choice.off(),)
    full = BatchView(2, view_of(2, [Hint(8, 5)]).requests, 7)
    assert memory.given(full) is None


@pytest.mark.parametrize("alone", [False, True])
def test_rounds_that_were_shared_are_not_kept_for_fewer(alone: bool) -> None:
    """What a model drafts for two was chosen at half the price; a look-up costs nobody else anything."""
    memory, matched, gap = Memory(), Hint(8, 16), Hint(8, 0)
    memory._came.update(("r0", "r1"))
    memory.keep(view_of(1, [gap, gap]), MODEL, MODEL)
    memory.keep(view_of(2, [matched, matched]), LOOK_UP, LOOK_UP)
    assert memory.given(view_of(3, [gap, matched if alone else gap])) == (
        None if alone else (MODEL, MODEL)
    )
    assert memory.given(view_of(3, [matched, matched])) == (LOOK_UP, LOOK_UP)
    memory.keep(
        view_of(4, [gap, matched]), MODEL, LOOK_UP
    )  # a plan for one is kept for one, and two
    assert memory.given(view_of(5, [gap, matched])) == (MODEL, LOOK_UP)


def test_what_is_kept_does_not_grow_without_limit() -> None:
    memory = Memory()
    for number in range(2000):
        memory.keep(view_of(number, [Hint(8, 5)], name=f"{number}-"), LOOK_UP)
    assert len(memory.choices._made) <= 256


def test_hints_of_arms_that_nobody_may_use_say_nothing() -> None:
    memory = Memory()
    hints: Mapping[str, Hint] = {"other": Hint(3, 2)}
    request = RequestView("r0", 900, 500, 999, 0.0, ARMS, hints)
    memory.keep(BatchView(1, (request,), 1000), MODEL)
    memory._came.clear()
    assert memory.given(BatchView(2, (request,), 1000)) == (MODEL,)


def test_what_one_request_was_given_does_not_pile_up_while_it_decodes_for_hours() -> None:
    """Of two drafters that look up, hints say something else in nearly every step: all of it would be looked through."""
    memory, arms = Memory(), ("ngram", "suffix")
    for step in range(3000):
        hints = {"ngram": Hint(step % 9, 1 << step % 7), "suffix": Hint(step % 8, 1 << step % 5)}
        request = RequestView("r", 900, 500, 999, 0.0, arms, hints)
        memory.keep(BatchView(step, (request,), 1000), Choice.off())
        memory.pass_steps(1)
        memory.choices.outdate()
    assert sum(len(given) for given in memory.choices._made.values()) <= 128
