"""How much less of a drafter's gain the last request of a batch has, learnt from batches."""

from collections.abc import Sequence

import numpy as np
import pytest

from sdcontrol.core import BatchView, Choice, Observation, Plan, RequestView, Timing
from sdcontrol.policies.goodput import Goodput
from sdcontrol.policies.last_gains import LastGains, expected_most
from sdcontrol.policies.worth import Worth

NAMES = tuple("abcdefgh")
COPIES = (0.1, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.9)
"""How often n-grams are right; the first request ends last."""
ALIKE = (0.6,) * 8


def observed(
    step: int, names: Sequence[str], right: Sequence[bool], shadow: Sequence[bool]
) -> Observation:
    """A step in which all draft with the model, and n-grams are scored beside it."""
    requests = tuple(RequestView(name, 900, 9, 200) for name in names)
    view = BatchView(step, requests, 1 << 20)
    one = (1,) * len(names)
    accepted = tuple(map(int, right))
    emitted = tuple(n + 1 for n in accepted)
    found: dict[str, tuple[int | None, ...]] = {"ngram": tuple(map(int, shadow))}
    plan = Plan((Choice.of("draft_model", 1),) * len(names), "")
    return Observation(view, plan, one, one, accepted, emitted, Timing({}, 0.01), shadow=found)


def learnt(
    copies: Sequence[float], models: Sequence[float], *, batches: int = 8, last: str = "a"
) -> LastGains:
    gains, rng = LastGains(), np.random.default_rng(3)
    for _ in range(batches):
        gains.begin(NAMES)
        for step in range(30):
            drawn = rng.random((2, len(NAMES)))
            gains.count(observed(step, NAMES, list(drawn[0] < models), list(drawn[1] < copies)))
        gains.learn([last])
    return gains


def test_who_ends_last_keeps_little_of_a_drafter_that_copies() -> None:
    """And all of one that is as often right everywhere."""
    kept = learnt(COPIES, ALIKE).kept(len(NAMES))
    assert kept["ngram"] == pytest.approx(0.1 / np.mean(COPIES), abs=0.2)
    assert kept["draft_model"] > 0.95


def test_luck_says_nothing_of_the_next_batch() -> None:
    """Of requests that are alike the last one is chosen for its luck, batch by batch."""
    gains, rng = LastGains(), np.random.default_rng(5)
    for _ in range(12):
        gains.begin(NAMES)
        right = np.zeros(len(NAMES))
        for step in range(30):
            drawn = rng.random(len(NAMES)) < 0.6
            right += drawn
            gains.count(observed(step, NAMES, list(drawn), [True] * len(NAMES)))
        gains.learn([NAMES[int(right.argmin())]])
    assert gains.kept(len(NAMES))["draft_model"] > 0.9
    assert gains.kept(len(NAMES))["ngram"] == 1.0


def test_more_requests_have_a_last_one_that_is_further_behind() -> None:
    kept = learnt(COPIES, ALIKE).kept
    assert kept(1)["ngram"] == 1.0 > kept(2)["ngram"] > kept(8)["ngram"] > kept(64)["ngram"] >= 0.0
    assert expected_most(1) == 0.0


def test_the_last_one_never_keeps_more_than_all() -> None:
    assert learnt(COPIES, ALIKE, last="h").kept(len(NAMES))["ngram"] == 1.0


def test_what_nobody_drafted_often_enough_teaches_nothing() -> None:
    gains = LastGains()
    gains.begin(NAMES)
    for step in range(2):
        gains.count(observed(step, NAMES, [True] * 8, [False] * 8))
    gains.learn(["a"])
    assert gains.kept(8) == {}


def begun(copies: Sequence[float], steps: int, seed: int = 0) -> LastGains:
    """A first batch that is not over."""
    gains, rng = LastGains(), np.random.default_rng(seed)
    gains.begin(NAMES)
    for step in range(steps):
        drawn = rng.random((2, len(NAMES)))
        gains.count(observed(step, NAMES, list(drawn[0] < ALIKE), list(drawn[1] < copies)))
    return gains


def test_before_any_batch_is_over_its_own_requests_say_how_far_the_last_one_is_behind() -> None:
    """As soon as they differ by more than luck; on average over 20 batches of each kind."""
    differing = [begun(COPIES, 8, seed).kept(8)["ngram"] for seed in range(20)]
    alike = [begun(ALIKE, 8, seed).kept(8)["ngram"] for seed in range(20)]
    assert np.mean(differing) < 0.75 < 0.9 < np.mean(alike)
    assert np.mean([begun(COPIES, 32, seed).kept(8)["ngram"] for seed in range(20)]) < 0.6
    assert begun(COPIES, 3).kept(8) == {}


def test_what_the_present_batch_says_ends_with_it() -> None:
    gains = begun((0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0), 8)
    assert gains.kept(8)["ngram"] < 0.2
    gains.begin(NAMES)
    assert gains.kept(8) == {}


def test_a_batch_that_is_not_over_is_dropped_when_another_begins() -> None:
    gains = LastGains()
    for _ in range(2):
        gains.begin(NAMES)
        for step in range(30):
            gains.count(observed(step, NAMES, [True] * 8, [True] * 8))
    gains.begin(NAMES[:2])
    gains.learn(["a"])
    assert gains.kept(8) == {}


def decode(worth: Worth, batches: int, *, is_followed: bool) -> None:
    """Batches in which `a` ends 20 steps after all others, and n-grams are right in those alone."""
    step = 0
    for batch in range(batches):
        for n in range(40):
            names = [f"{batch}{name}" for name in (NAMES if n < 20 else NAMES[:1])]
            if is_followed and n >= 20:
                names += [f"{batch}{name}2" for name in NAMES[1:]]
            right = [not name.endswith("a") for name in names]
            worth.update(observed(step, names, [True] * len(names), right))
            step += 1


@pytest.mark.parametrize("is_followed", [False, True])
def test_only_batches_that_nothing_follows_are_learnt_from(is_followed: bool) -> None:
    worth = Worth()
    decode(worth, 4, is_followed=is_followed)
    kept = worth.stragglers.gains.kept(len(NAMES))
    assert ("ngram" in kept) is not is_followed
    if not is_followed:
        assert kept["ngram"] < 0.6
        assert kept["draft_model"] == 1.0


def test_what_is_learnt_reaches_the_weights_by_family() -> None:
    """Of those that nothing is known of, all is kept."""
    policy = Goodput()
    assert policy.worth is not None
    decode(policy.worth, 4, is_followed=False)
    view = observed(999, ["4a", "4b"], [True] * 2, [True] * 2).view
    told = policy.worth.pace(view).told(("ngram", "sparse_kv", "draft_model"))
    assert told[3][0] < told[3][1] == told[3][2] == 1.0
