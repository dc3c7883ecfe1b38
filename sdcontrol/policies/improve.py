"""The last touch: move one request at a time.

Needed where rounds are priced in steps, or where KV slots are so few that the concave envelopes are
cut inside a segment; elsewhere nothing is left to move. Knows the exact price of every move, and
takes the best one while that pays.
"""

import numpy as np

from sdcontrol.core import FloatArray
from sdcontrol.policies.arrays import column, counting
from sdcontrol.policies.problem import Answer, IntArray, Problem, evaluate

__all__ = ["improve"]

_MOST_MOVES = 4
_LEAST = 5e-4  # of the gain


def improve(problem: Problem, answer: Answer, rate: float | None) -> Answer:
    """`answer` after up to 4 changes of one request's arm and length, each the best one.

    `rate` is the given price of a second, None: the answer's own ratio.
    """
    for _ in range(_MOST_MOVES):
        price = answer.rate if rate is None else rate
        growth = _growth(problem, answer, price)
        move = int(growth.argmax())
        if growth.flat[move] <= _LEAST * answer.gain:
            break
        a, n, r = np.unravel_index(move, growth.shape)
        arm, length = answer.arm.copy(), answer.length.copy()
        arm[r], length[r] = a, n
        moved = evaluate(problem, arm, length)
        if moved.gain - answer.gain <= price * (moved.seconds - answer.seconds):
            break
        answer = moved
    return answer


def _growth(problem: Problem, answer: Answer, rate: float) -> FloatArray:
    """`[arms, lengths, requests]`: by how much each move raises `gain - rate * seconds`."""
    rows, lengths = counting(problem.batch), problem.lengths
    arm, length = answer.arm, answer.length
    seconds = _rounds_after(problem, arm, length)
    if problem.excess is not None:
        seconds += problem.excess[:, None] * column(lengths) - problem.excess[arm, rows] * length
    if problem.catch_up is not None:
        seconds += problem.catch_up[:, None] * (column(lengths) > 0)
        seconds -= problem.catch_up[arm, rows] * (length > 0)
    tokens = length.sum() - length + column(lengths)  # [lengths, requests]
    last = len(problem.verify) - 1
    seconds += problem.verify[np.minimum(tokens, last)]
    growth: FloatArray = problem.gain - rate * seconds
    growth -= growth[arm, length, rows]
    growth[:, tokens > last] = -np.inf
    return growth


def _rounds_after(problem: Problem, arm: IntArray, length: IntArray) -> FloatArray:
    """`[arms, lengths, requests]`: seconds of all rounds after a move, but for a constant."""
    families, lengths = problem.round.shape[0], problem.lengths
    family = problem.family[arm]
    cells = np.bincount(family * lengths + length, minlength=families * lengths)
    drafting = np.add.accumulate(cells.reshape(families, lengths)[:, ::-1], axis=1)[:, ::-1]
    index = counting(families)[:, None]
    most = problem.batch
    joined = _sums(problem, index, np.minimum(drafting + 1, most)) - _sums(problem, index, drafting)
    left = _sums(problem, index, drafting) - _sums(problem, index, np.maximum(drafting - 1, 0))
    # leave the family's first `length` rounds, then join the first n of another or of the same one
    rejoined = np.where(
        column(lengths) <= length,
        left[family].T,
        left[family, length] + joined[family].T - joined[family, length],
    )  # [lengths, requests]
    same = problem.family[:, None] == family  # [arms, requests]
    seconds = np.where(same[:, None], rejoined, joined[problem.family][:, :, None])
    return seconds - left[family, length]


def _sums(problem: Problem, family: IntArray, drafting: IntArray) -> FloatArray:
    """Seconds of the first n rounds to come, `[families, lengths]`, 0 for none."""
    seconds = problem.round[family, drafting]
    seconds[:, 0] = 0.0
    if problem.drafted is not None:
        seconds *= counting(problem.lengths) > problem.drafted[:, None]
    return np.add.accumulate(seconds, axis=1)
