"""Tries that follow one which had to catch up: how many, and for how long they are due."""

import pytest

from sdcontrol.core import BatchView, Choice, Hint, Observation, Plan, RequestView, Timing
from sdcontrol.policies.follow_ups import FollowUps
from sdcontrol.policies.tries import FOLLOWS_UP, PRICE, PROBES

ARM = "draft_model"


def tried(mark: str, lag: int, seconds: float) -> Observation:
    """A lone request's try of a token, whose drafting took so many seconds."""
    request = RequestView("r", 900, 9, 90, 0.0, (ARM,), {ARM: Hint(catch_up_tokens=lag)})
    plan = Plan((Choice.of(ARM, 1),), f"goodput{mark}{ARM}{PRICE}0.001 s")
    timing = Timing({ARM: seconds}, 0.01)
    return Observation(BatchView(0, (request,), 99), plan, (1,), (1,), (0,), (1,), timing)


def quiet() -> Observation:
    request = RequestView("r", 900, 9, 90, 0.0, (ARM,), {ARM: Hint(catch_up_tokens=9)})
    view = BatchView(0, (request,), 99)
    return Observation(view, Plan.off(view), (0,), (0,), (0,), (1,), Timing({}, 0.01))


def followed(first_seconds: float, seconds: float) -> int:
    """How often a try is followed up."""
    tries, times = FollowUps(), 0
    tries.update(tried(PROBES, 800, first_seconds))
    while tries.arm == ARM:
        tries.update(tried(FOLLOWS_UP, 1, seconds))
        times += 1
    return times


@pytest.mark.parametrize(
    ("first", "each", "times"), [(0.1, 0.2, 1), (0.1, 0.01, 3), (1.0, 0.0001, 8)]
)
def test_a_quarter_of_what_the_first_took_is_spent_again(
    first: float, each: float, times: int
) -> None:
    """Once in any case, and 8 times at most."""
    assert followed(first, each) == times


def test_a_try_that_had_nothing_to_catch_up_with_is_not_followed_up() -> None:
    tries = FollowUps()
    tries.update(tried(PROBES, 1, 0.1))
    assert tries.arm == ""


def test_what_was_not_followed_up_in_8_steps_is_not_due_any_more() -> None:
    tries = FollowUps()
    tries.update(tried(PROBES, 800, 1.0))
    for _ in range(7):
        tries.update(quiet())
    assert tries.arm == ARM
    tries.update(quiet())
    assert tries.arm == ""


def test_a_follow_up_that_catches_up_with_a_few_tokens_begins_no_new_ones() -> None:
    """Rounds of whoever lags by a little more than it drafts are no first use."""
    tries, times = FollowUps(), 0
    tries.update(tried(PROBES, 800, 1.0))
    while tries.arm == ARM and times < 100:
        tries.update(tried(FOLLOWS_UP, 5, 0.0001))
        times += 1
    assert times == 8
