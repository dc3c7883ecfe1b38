"""Plans of few requests: any numbers of rounds, each filled exactly."""

import itertools

import numpy as np
import pytest

from sdcontrol.core import FloatArray
from sdcontrol.policies.all_rounds import is_small, open_rounds
from sdcontrol.policies.maximise import maximise
from sdcontrol.policies.plan_state import Priced, blank, value
from sdcontrol.policies.problem import Problem
from sdcontrol.policies.search import settle

NEVER = -1e30


def drawn(rng: np.random.Generator, requests: int, families: int, tokens: int) -> Priced:
    """In tokens: rounds with a base and a price per request, verification of any shape that does not fall."""
    own = np.zeros((requests, families, tokens + 1))
    own[:, :, 1:] = np.cumsum(rng.uniform(0.0, 1.0, (requests, families, tokens)), axis=2)
    for r, f in itertools.product(range(requests), range(families)):
        own[r, f, 1 + int(rng.integers(1, tokens + 1)) :] = NEVER
    verify = np.cumsum(rng.choice([0.0, 0.0, 0.3, 1.5], requests * tokens + 1))
    rounds = np.zeros((families + 1, requests + 2))
    base, each = rng.uniform(0.0, 1.0, families), rng.uniform(0.0, 0.2, families)
    counts = np.arange(1, requests + 1)
    rounds[:families, 1 : requests + 1] = base[:, None] + each[:, None] * counts
    rounds[families, 1:] = rng.choice([0.0, 0.1])
    return own, verify[: int(rng.integers(2, len(verify) + 1))], rounds, np.zeros(families + 1, int)


def worth_of(priced: Priced, family: tuple[int, ...], length: tuple[int, ...]) -> float:
    """What a plan is worth beside that of no drafts; minus infinity where it cannot be."""
    own, verify, rounds, _ = priced
    tokens = sum(length)
    if tokens >= len(verify):
        return -np.inf
    total = float(verify[0] - verify[tokens])
    total += sum(float(own[r, f, n]) for r, (f, n) in enumerate(zip(family, length, strict=True)))
    for j in range(1, own.shape[2]):
        for f in range(own.shape[1]):
            count = sum(g == f and n >= j for g, n in zip(family, length, strict=True))
            total -= float(rounds[f, count])
        total -= float(rounds[-1, 1]) * (max(length) >= j)
    return total


def best_of_all(priced: Priced) -> float:
    """By trying everything."""
    requests, families, lengths = priced[0].shape
    options = [(0, 0), *itertools.product(range(families), range(1, lengths))]
    plans = itertools.product(options, repeat=requests)
    return max(worth_of(priced, *zip(*plan, strict=True)) for plan in plans)


@pytest.mark.parametrize(("requests", "families", "tokens"), [(3, 1, 4), (3, 2, 2), (2, 3, 3)])
def test_where_rounds_are_linear_the_best_plan_is_found_which_responses_alone_miss(
    requests: int, families: int, tokens: int
) -> None:
    """Stairs that pay only if several requests climb them together, and few KV slots, included."""
    rng, drafted, missed = np.random.default_rng(requests * families), 0, 0
    for _ in range(60):
        priced = drawn(rng, requests, families, tokens)
        found = open_rounds(priced, blank(priced))
        best = best_of_all(priced)
        assert value(priced, found) == pytest.approx(best, abs=1e-9)
        alone = blank(priced)
        settle(priced, alone, 0)
        drafted += best > 0.0
        missed += value(priced, alone) < best - 1e-9
    assert drafted > 20
    assert missed > 5


def test_no_more_than_so_many_options_are_small() -> None:
    assert is_small((5, 3, 5), 60)
    assert is_small((16, 1, 5), 64)
    assert not is_small((33, 1, 3), 66)  # options
    assert not is_small((3, 2, 16), 90)  # sums: 121 openings


@pytest.mark.parametrize("families", [8, 12])
def test_of_many_families_numbers_of_rounds_are_left_out(families: int) -> None:
    """So many that there is room for none of them."""
    gain = np.repeat(np.array([0.0, 0.8])[None, None, :], families, axis=0).repeat(2, axis=1)
    shape = families, 2
    nothing: FloatArray = np.zeros(shape)
    rounds = np.full((families + 1, 4), 0.1)
    rounds[:, 0] = rounds[-1] = 0.0
    names = tuple(f"d{f}" for f in range(families))
    limit, family = np.ones(shape, np.int64), np.arange(families)
    verify, drafted = np.array([1.0, 1.0, 1.0]), np.zeros(families + 1, np.int64)
    answer = maximise(
        Problem(names, gain, limit, family, verify, rounds, nothing, nothing.copy(), drafted)
    )
    assert answer.length.tolist() == [1, 1]
    assert answer.arm[0] == answer.arm[1]
