"""What trying an arm that is off costs, and what it could bring if it were accepted more often.

Knows nothing of when to try one. The log-odds of acceptance are believed to within `spread`, a
standard deviation; the expected improvement is that of the better half of what they may be.
"""

import math

import numpy as np

from sdcontrol.compiled import compiled
from sdcontrol.core import FloatArray
from sdcontrol.policies.problem import TABLES, Answer, IntArray, Problem, Tables

__all__ = ["cheapest", "together", "upside"]

_ANSWER = "Tuple((int64[::1], int64[::1], float64))"
_HOPES = ((1.0, 0.24), (2.0, 0.07))  # spreads above what is believed, and how likely
_LEAST_RATE = 1e-6
_LEAST_SHARE = 0.02  # of a plain step, that a try counts for even where it is free
_LONE, _IDLE, _ALL = range(3)  # who might use the arm

_Answer = tuple[IntArray, IntArray, float]


def cheapest(
    problem: Problem, answer: Answer, a: int, r: int, *, most_tokens: int
) -> tuple[int, float]:
    """Draft tokens, and seconds, of the try by request `r` of most expected outcomes per second.

    The seconds are those of drafting, verification and the tokens of the plan given up. 0 tokens
    where it cannot try.
    """
    plan = answer.arm, answer.length, float(answer.rate)
    return _cheapest(problem.tables, plan, a, r, most_tokens)


def upside(
    problem: Problem,
    answer: Answer,
    a: int,
    r: int,
    *,
    spread: float,
    round_share: float,
    catch_up_share: float,
) -> float:
    """By what share arm `a` is expected to raise the rate, where it turns out well; at least 0.

    It might be used by request `r` alone, by all without drafts, or by all. A round may turn out to
    take only `round_share` of what is believed, and `catch_up_share` of what is charged for catching up.
    """
    plan = answer.arm, answer.length, float(answer.rate)
    return float(_upside(problem.tables, plan, a, r, (spread, round_share, catch_up_share)))


def together(
    problem: Problem, answer: Answer, a: int, charged: FloatArray, *, most_tokens: int
) -> tuple[int, float, float, float]:
    """The try by all requests at once of most expected outcomes per second.

    Draft tokens, the seconds that it costs beside the plan, those of its drafting, and outcomes per
    second. `charged` is the share of each catch-up that the problem charges to a step, `[requests]`; a
    try pays all of it. 0 tokens where fewer than two can try.
    """
    plan = answer.arm, answer.length, float(answer.rate)
    return _together(problem.tables, plan, a, charged, most_tokens)


@compiled(
    f"Tuple((int64, float64, float64, float64))({TABLES}, {_ANSWER}, int64, float64[::1], int64)"
)
def _together(
    tables: Tables, plan: _Answer, a: int, charged: FloatArray, most_tokens: int
) -> tuple[int, float, float, float]:
    gain, limit, family, verify, rounds, _, catch_up, _ = tables
    best, best_seconds, best_drafting, most_outcomes = 0, 0.0, 0.0, 0.0
    for n in range(1, min(most_tokens, gain.shape[2] - 1) + 1):
        users, drafts = 0, 0
        tokens, outcomes, drafting = float(gain.shape[1]), 0.0, 0.0
        for r in range(gain.shape[1]):
            m = min(n, limit[a, r])
            if m > 0:
                users += 1
                drafts += m
                tokens += gain[a, r, m]
                outcomes += 1.0 + gain[a, r, m - 1]
                drafting += catch_up[a, r] / charged[r]
        if users < 2 or drafts >= len(verify):
            break
        drafting += n * rounds[family[a], users]
        forward = verify[drafts] + n * rounds[-1, 1]
        seconds = max(forward + drafting - tokens / plan[2], _LEAST_SHARE * verify[0])
        if outcomes > most_outcomes * seconds:
            best, best_seconds, best_drafting = n, seconds, drafting
            most_outcomes = outcomes / seconds
    return best, best_seconds, best_drafting, most_outcomes


@compiled(f"Tuple((int64, float64))({TABLES}, {_ANSWER}, int64, int64, int64)")
def _cheapest(tables: Tables, plan: _Answer, a: int, r: int, most_tokens: int) -> tuple[int, float]:
    gain, limit, family, verify, rounds, _, catch_up, _ = tables
    arm, length, rate = plan
    held, others, longest = length[r], length.sum() - length[r], 0
    for other in range(len(length)):
        if other != r:
            longest = max(longest, length[other])
    expected, best, best_seconds, most_outcomes = gain[arm[r], r, held], 0, 0.0, 0.0
    for n in range(1, min(limit[a, r], most_tokens, len(verify) - 1 - others) + 1):
        seconds = rounds[family[a], 1] * n + catch_up[a, r]
        padding = (max(longest, n) - max(longest, held)) * rounds[-1, 1]
        seconds += max(verify[others + n] - verify[others + held] + padding, 0.0)
        seconds += max(expected - gain[a, r, n], 0.0) / rate
        seconds = max(seconds, _LEAST_SHARE * verify[0])
        outcomes = (
            1.0 + gain[a, r, n - 1]
        ) / seconds  # a token counts where those before were right
        if outcomes > most_outcomes:
            best, best_seconds, most_outcomes = n, seconds, outcomes
    return best, best_seconds


@compiled(f"float64[:,::1]({TABLES}, int64, float64)")
def _hoped(tables: Tables, a: int, ratio: float) -> FloatArray:
    """Gains of arm `a` at `ratio` times the odds of acceptance, `[requests, lengths]`."""
    gain, limit = tables[0], tables[1]
    requests, lengths = gain.shape[1], gain.shape[2]
    hoped = np.zeros((requests, lengths))
    for r in range(requests):
        reached = survival = 1.0
        for n in range(1, lengths):
            hoped[r, n] = hoped[r, n - 1]
            believed = gain[a, r, n] - gain[a, r, n - 1]
            if n <= limit[a, r] and believed > 0.0:
                rate = min(max(believed / survival, _LEAST_RATE), 1.0 - _LEAST_RATE)
                odds = rate / (1.0 - rate) * ratio
                reached *= odds / (1.0 + odds)
                hoped[r, n] += reached
                survival = believed
    return hoped


@compiled("float64(float64[:,:,::1], int64[::1], int64[::1])")
def _tokens(gain: FloatArray, arm: IntArray, length: IntArray) -> float:
    """That a plan is expected to emit."""
    tokens = float(len(arm))
    for r in range(len(arm)):
        tokens += gain[arm[r], r, length[r]]
    return tokens


@compiled(f"float64({TABLES}, {_ANSWER}, float64[:,::1], UniTuple(int64, 4), UniTuple(float64, 2))")
def _rate_with(
    tables: Tables,
    plan: _Answer,
    hoped: FloatArray,
    how: tuple[int, int, int, int],
    shares: tuple[float, float],
) -> float:
    """The rate where others use an arm; `how`: the arm, a request, who uses it, tokens for each."""
    gain, limit, family, verify, rounds, _, catch_up, _ = tables
    arm, length, rate = plan
    a, lone, who, n = how
    tokens, held = _tokens(gain, arm, length), length.sum()
    others = 0.0 if who == _ALL else tokens / rate - verify[held]  # the plan's drafting and padding
    longer = n if who == _ALL else max(n - length.max(), 0)
    drafts, users, lag = held, 0, 0.0
    for r in range(len(arm)):
        is_asked = r == lone if who == _LONE else who == _ALL or length[r] == 0
        if is_asked and limit[a, r] > 0:
            most = min(n, limit[a, r])
            tokens += hoped[r, most] - gain[arm[r], r, length[r]]
            drafts += most - length[r]
            lag += catch_up[a, r]
            users += 1
    if users == 0 or drafts >= len(verify):
        return 0.0
    seconds = others + verify[drafts] + n * shares[0] * rounds[family[a], users] + shares[1] * lag
    seconds += longer * rounds[-1, 1]
    return float(tokens / seconds)


@compiled(f"float64({TABLES}, {_ANSWER}, int64, int64, UniTuple(float64, 3))")
def _upside(
    tables: Tables, plan: _Answer, a: int, lone: int, doubts: tuple[float, float, float]
) -> float:
    spread, rate, expected = doubts[0], plan[2], 0.0
    for hope, likelihood in _HOPES:
        hoped, best = _hoped(tables, a, math.exp(hope * spread)), rate
        for who in (_LONE, _IDLE, _ALL):
            for n in range(1, hoped.shape[1]):
                best = max(best, _rate_with(tables, plan, hoped, (a, lone, who, n), doubts[1:]))
        expected += likelihood * (best / rate - 1.0)
    return expected
