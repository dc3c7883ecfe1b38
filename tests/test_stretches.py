"""How many tokens a catch-up serves, where drafters take turns and where they do not."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from sdcontrol.core import BatchView, Belief, Choice, Hint, Observation, Plan, RequestView, Timing
from sdcontrol.policies.endings import to_go
from sdcontrol.policies.goodput import Goodput
from sdcontrol.policies.posing import bolder, charged
from sdcontrol.policies.reading import read
from sdcontrol.policies.stretches import Stretches
from sdcontrol.policies.tries import PRICE, PROBES
from tests.plan_instances import DrawnCost

ARMS = ("ngram", "draft_model")


def observed(
    step: int,
    arms: dict[str, str | None],
    *,
    emitted: int = 2,
    lag: int = 8,
    remaining: int = 400,
) -> Observation:
    """By request, what it drafted a token with."""
    hints = {"ngram": Hint(8, 1), "draft_model": Hint(catch_up_tokens=lag)}
    requests = tuple(RequestView(name, 900, 500, remaining, 0.0, ARMS, hints) for name in arms)
    choices = tuple(Choice.off() if arm is None else Choice.of(arm, 1) for arm in arms.values())
    one, accepted = (1,) * len(arms), (emitted - 1,) * len(arms)
    view, timing = BatchView(step, requests, 1000), Timing({}, 0.01)
    more = (emitted,) * len(arms)
    return Observation(view, Plan(choices), one, one, accepted, more, timing)


def after(stretches: Stretches, arms: Sequence[str | None]) -> float:
    """What later catch-ups are spread over, after a request used these arms in turn."""
    for step, arm in enumerate(arms):
        stretches.update(observed(step, {"r": arm}))
    return stretches.horizon[1]


@pytest.mark.parametrize(("steps", "tokens"), [(1, 2.0), (3, 6.0)])
def test_a_later_catch_up_is_spread_over_as_many_tokens_as_stretches_last(
    steps: int, tokens: float
) -> None:
    turn = ["draft_model"] * steps + ["ngram"]
    assert after(Stretches(64), turn * 100) == pytest.approx(tokens, rel=0.05)


def test_whoever_goes_on_has_shown_no_end() -> None:
    """Nor has a request that ended while it drafted so, nor a drafter that never had to catch up."""
    assert after(Stretches(64), ["draft_model"] * 200) == 64.0
    assert after(Stretches(64), ["ngram", None] * 200) == 64.0
    ended = Stretches(64)
    for step in range(200):
        ended.update(observed(step, {f"r{step}": "draft_model"}))
    assert ended.horizon[:3] == (512.0, 64.0, 1.0)  # and no request's first catch-up was seen


def test_tries_say_how_well_and_nothing_of_how_long() -> None:
    """They end after one step because they are tries."""
    stretches = Stretches(64)
    for step in range(100):
        one = observed(step, {"r": "draft_model"}, lag=800)
        words = f"goodput{PROBES}draft_model{PRICE}0.001 s"
        stretches.update(replace(one, plan=Plan(one.plan.choices, words)))
        stretches.update(observed(step, {"r": None}, lag=800))
    assert stretches.horizon == (512.0, 64.0, 1.0, 0.0)


def test_what_is_hoped_of_catch_ups_is_what_they_are_charged_once_it_is_known() -> None:
    """512 tokens instead of 64, of requests with as many to go; those with fewer have less to hope for."""
    hints = {"draft_model": Hint(catch_up_tokens=900)}
    arms = ("draft_model",)
    survival = {"draft_model": np.full((3, 2), 0.5)}
    cost = DrawnCost(
        "linear", 1.0, 0.01, 1, 0.0, {"draft_model": (0.1, 0.0, 0.0)}, per_catch_up_token=0.01
    )

    def hoped(*remaining: int) -> float:
        stretches = Stretches(64)
        requests = tuple(
            RequestView(str(r), 900, 1, left, 0.0, arms, hints) for r, left in enumerate(remaining)
        )
        view = BatchView(0, requests, 10_000)
        problem = read(view, Belief(survival, cost), stretches.horizon)
        assert problem is not None
        return stretches.hoped(view, problem, 0)

    assert hoped(2000, 2000, 2000) == pytest.approx(
        (1 / 512 + 1 / 512 + 1 / 1800) / (1 / 512 + 2 / 64)
    )
    # Of 81 tokens after 899, had all of them caught up when they came.
    assert hoped(80, 80, 80) == pytest.approx(3 * (899 / 900) / 72.9 / (1 / 72 + 2 / 64))


def test_long_stretches_and_none_at_all_stay_within_the_setting() -> None:
    assert after(Stretches(16), (["draft_model"] * 40 + ["ngram"]) * 20) == 16.0
    nothing = Stretches(64)
    for step in range(400):
        nothing.update(observed(step, {"r": ARMS[step % 2]}, emitted=0))
    assert nothing.horizon[1] == 1.0


def shares(stretches: Stretches, uses: int, *, requests: int = 100, first_lag: int = 800) -> float:
    """The share, after requests with 40 tokens to go each got 2 from a draft model, `uses` times, then the rest."""
    for number in range(requests):
        for use in range(uses):
            lag = first_lag if not use else 0
            seen = observed(use, {f"r{number}": "draft_model"}, lag=lag, remaining=40 - 2 * use)
            stretches.update(seen)
        left = 40 - 2 * uses
        stretches.update(observed(uses, {f"r{number}": "ngram"}, remaining=left, emitted=left))
    return stretches.horizon[2]


@pytest.mark.parametrize(("uses", "share"), [(1, 0.05), (5, 0.25), (20, 1.0)])
def test_a_first_catch_up_is_spread_over_what_requests_get_of_the_tokens_to_go(
    uses: int, share: float
) -> None:
    assert shares(Stretches(64), uses) == pytest.approx(share, abs=0.02)


def test_names_may_be_used_again() -> None:
    """As by whoever generates again and again with one controller: each use of a name counts."""
    stretches = Stretches(64)
    for _ in range(100):
        stretches.update(observed(0, {"request-0": "draft_model"}, lag=800, remaining=40))
        stretches.update(observed(1, {"request-0": "ngram"}, remaining=38, emitted=38))
    assert stretches.horizon[2] == pytest.approx(0.05, abs=0.02)


@pytest.mark.parametrize("remaining", [0, -5])
def test_whoever_drafts_with_nothing_left_to_emit_is_no_error(remaining: int) -> None:
    """A loop may observe it, whatever was planned; tokens that came are all that could."""
    stretches = Stretches(64)
    stretches.update(observed(0, {"r": "draft_model"}, lag=900, remaining=remaining))
    stretches.update(observed(1, {"other": "draft_model"}, lag=900))
    assert stretches.horizon[2] == 1.0


def test_requests_that_were_caught_up_all_along_say_nothing_of_first_catch_ups() -> None:
    assert shares(Stretches(64), 5, first_lag=8) == 1.0


def test_a_share_that_kept_everybody_away_is_forgotten() -> None:
    """In thousands of steps, since whoever comes back pays for it."""
    stretches = Stretches(64)
    few = shares(stretches, 1)
    for step in range(1000):
        stretches.update(observed(step, {"r": "ngram"}))
    assert few < stretches.horizon[2] < 0.2
    for step in range(20_000):
        stretches.update(observed(step, {"r": "ngram"}))
    assert stretches.horizon[2] > 0.9


def test_turns_and_first_catch_ups_that_do_not_pay_are_taken_no_more() -> None:
    """A token of two, after a lag of 30 that takes as long as three steps."""

    class Lagging(DrawnCost):
        def catch_up_seconds(self, family: str, num_tokens: int) -> float:
            return 0.1 * num_tokens

    cost = Lagging(
        "linear", 1.0, 1e-4, 1, 0.0, {"ngram": (0.0, 0.0, 0.0), "draft_model": (0.2, 0.0, 0.0)}
    )
    survival = {"ngram": np.zeros((1, 2)), "draft_model": np.array([[0.7, 0.2]])}

    def drafter(policy: Goodput, lag: int) -> str | None:
        hints = {"ngram": Hint(0, 0), "draft_model": Hint(catch_up_tokens=lag)}
        request = RequestView("r", 100, 9, 90, 0.0, ARMS, hints)
        view = BatchView(99, (request,), 99)
        return policy.plan(view, Belief(survival, cost)).choices[0].drafter

    policy = Goodput(probe_share=0.0)
    assert drafter(policy, 30) == drafter(policy, 80) == "draft_model"
    after(policy.stretches, ["draft_model", "ngram"] * 100)
    assert drafter(policy, 30) is None
    assert drafter(policy, 2) == drafter(policy, 80) == "draft_model"
    shares(policy.stretches, 1)
    assert drafter(policy, 80) is None  # of 90 tokens to go a request gets 4
    assert drafter(policy, 2) == "draft_model"


@pytest.mark.parametrize(
    ("lag", "remaining", "share", "served"),
    [
        (8000, 2000, 1.0, 512.0),  # its prompt: serves all that is to come
        (8000, 300, 0.5, 135.0),  # a tenth less, since it cannot be taken back
        (40, 2000, 1.0, 30.0),  # after others drafted: serves a stretch
        (40, 20, 1.0, 20.0),
    ],
)
def test_a_catch_up_is_charged_to_the_tokens_that_it_serves(
    lag: int, remaining: int, share: float, served: float
) -> None:
    """A lagging prompt once, and not again in every stretch."""
    horizon = (512.0, 30.0, share, 0.0)
    assert charged((lag, remaining), 8200.0, 3.0, horizon) == pytest.approx(3.0 / served)


def answered(requests: int, tokens: int, may_have: int) -> Stretches:
    """After requests one after the other, each of which got so many of the tokens that it might have had."""
    stretches = Stretches(64)
    for number in range(requests):
        for came in range(0, tokens, 2):
            seen = observed(came, {f"r{number}": "ngram"}, remaining=may_have - came)
            stretches.update(seen)
    return stretches


def test_requests_that_end_by_themselves_have_less_to_go_than_they_may() -> None:
    horizon = answered(40, 40, 1000).horizon
    expected = to_go(1000.0, horizon[3])
    assert expected == pytest.approx(40.0, rel=0.1)
    assert to_go(10.0, horizon[3]) == pytest.approx(9.0, abs=0.5), "the few that it may have"
    assert charged((8000, 1000), 8200.0, 3.0, horizon) == pytest.approx(3.0 / (0.9 * expected))


def test_requests_that_have_all_that_they_may_say_nothing_of_others() -> None:
    assert answered(40, 40, 40).horizon[3] == 0.0
    assert to_go(1000.0, 0.0) == 1000.0


def test_requests_of_batches_that_take_turns_have_not_ended() -> None:
    stretches = Stretches(64)
    for step in range(0, 600, 2):
        for batch in "abc":
            arms = {f"{batch}{r}": "ngram" for r in range(4)}
            stretches.update(observed(step, arms, remaining=1000 - step))
    assert stretches.horizon[3] == 0.0


@pytest.mark.parametrize("pause", [1, 20])
def test_names_that_are_used_again_are_other_requests(pause: int) -> None:
    """As by whoever generates again and again with one controller."""
    stretches = Stretches(64)
    for _ in range(40):
        for came in range(0, 40, 2):
            stretches.update(observed(came, {"slot": "ngram"}, remaining=1000 - came))
        for step in range(pause):
            stretches.update(observed(step, {}))
    assert to_go(1000.0, stretches.horizon[3]) == pytest.approx(40.0, rel=0.1)


def test_requests_that_never_got_anything_may_end() -> None:
    stretches = Stretches(64)
    for step in range(60):
        stretches.update(observed(step, {f"r{step}": "ngram"}, emitted=0))
    assert stretches.horizon[3] == 1.0


def test_answers_that_become_longer_are_followed() -> None:
    stretches = answered(40, 10, 1000)
    for number in range(64):
        for came in range(0, 200, 2):
            stretches.update(observed(came, {f"long{number}": "ngram"}, remaining=1000 - came))
    assert to_go(1e6, stretches.horizon[3]) > 150.0


def test_until_it_is_known_what_comes_of_it_one_request_catches_up_first() -> None:
    """That with most to go; once 12 tokens came of it, all of them may."""
    stretches = Stretches(64)
    assert bolder(stretches.horizon, True)[0] == 512.0
    assert bolder(stretches.horizon, False)[0] == 64.0
    for step in range(6):
        assert stretches.horizon[0] == 64.0
        stretches.update(observed(step, {"r": "draft_model"}, lag=800 if not step else 1))
    assert bolder(stretches.horizon, False)[0] == 512.0
