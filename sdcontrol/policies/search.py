"""Improve a plan, one request at a time: loops over arrays, compiled.

Knows nothing of views, names and seconds, nor of where a plan comes from. Whatever one request gains by a
change, the plan gains, since what others pay is counted: so responses and their sums are exact.
"""

import numpy as np

from sdcontrol.compiled import compiled
from sdcontrol.core import FloatArray
from sdcontrol.policies.plan_state import (
    PRICED,
    STATE,
    Priced,
    State,
    adopt,
    assign,
    blank,
    value,
)
from sdcontrol.policies.problem import IntArray

__all__ = ["kick", "settle", "shift"]

_LEAST = 1e-9  # tokens by which a change must be better
_MOST_SWEEPS = 12


@compiled(f"void({PRICED}, {STATE}, int64, float64[:,::1])")
def _respond(priced: Priced, state: State, r: int, worth: FloatArray) -> None:
    """Set what each choice of request `r` is worth while the others stay, `[families, lengths]`."""
    own, verify = priced[0], priced[1]
    family, length, _, joining, leaving, tokens = state
    held_family, held = family[r], length[r]
    first = tokens[0] - held
    last, everybody = min(worth.shape[1] - 1, len(verify) - 1 - first), len(joining) - 1
    for f in range(len(worth)):
        worth[f, 0] = 0.0
        for n in range(1, last + 1):
            m = min(n, held)
            padding = joining[everybody, n] - joining[everybody, m] + leaving[everybody, m]
            forward = verify[first + n] - verify[first] + padding
            worth[f, n] = own[r, f, n] - forward - joining[f, n]
        for n in range(last + 1, worth.shape[1]):
            worth[f, n] = -np.inf
    f = held_family  # its rounds count this request already, up to the length that it has
    for n in range(1, last + 1):
        m = min(n, held)
        worth[f, n] += joining[f, m] - leaving[f, m]


@compiled(f"Tuple((float64, int64, int64))({PRICED}, {STATE}, int64)", is_inlined=True)
def _best_response(priced: Priced, state: State, r: int) -> tuple[float, int, int]:
    """How much request `r` gains by its best choice while the others stay; family and length."""
    own, verify = priced[0], priced[1]
    family, length, _, joining, leaving, tokens = state
    held_family, held = family[r], length[r]
    first = tokens[0] - held
    last, everybody = min(own.shape[2] - 1, len(verify) - 1 - first), len(joining) - 1
    mine, after = own[r], verify[first:]
    more, less = joining[everybody], leaving[everybody]
    unpadded = more[held] - less[held]
    best, best_family, best_length = 0.0, 0, 0
    for f in range(len(mine)):
        shared = held if f == held_family else 0  # rounds that count this request already
        spared = joining[f, shared] - leaving[f, shared]
        for n in range(1, last + 1):
            rounds = leaving[f, n] if n <= shared else joining[f, n] - spared
            rounds += less[n] if n <= held else more[n] - unpadded
            worth = mine[f, n] - (after[n] - after[0]) - rounds
            if worth > best:
                best, best_family, best_length = worth, f, n
    if held:
        rounds = leaving[held_family, held] + less[held]
        best -= mine[held_family, held] - rounds - (after[held] - after[0])
    return best, best_family, best_length


@compiled(f"float64({PRICED}, {STATE}, int64)")
def settle(priced: Priced, state: State, fixed: int) -> float:
    """Let requests respond in turn until none changes; how much better that is.

    Request `fixed` responds last.
    """
    requests = priced[0].shape[0]
    total, unchanged, r = 0.0, 0, fixed
    for _ in range(_MOST_SWEEPS * requests):
        r = (r + 1) % requests
        better, f, n = _best_response(priced, state, r)
        unchanged += 1
        if better > _LEAST:
            assign(priced, state, r, f, n)
            total += better
            unchanged = 0
        if unchanged >= requests:
            break
    return total


@compiled(f"float64({PRICED}, {STATE}, int64)")
def _respond_best(priced: Priced, state: State, fixed: int) -> float:
    """Let the one request respond that gains most, `fixed` excepted; how much that is."""
    most, who, family, length = _LEAST, fixed, 0, 0
    for r in range(priced[0].shape[0]):
        if r != fixed:
            better, f, n = _best_response(priced, state, r)
            if better > most:
                most, who, family, length = better, r, f, n
    if who == fixed:
        return 0.0
    assign(priced, state, who, family, length)
    return float(most)


@compiled(f"Tuple((float64[::1], int64[:,::1]))({PRICED}, {STATE}, int64)")
def _least_losses(priced: Priced, state: State, count: int) -> tuple[FloatArray, IntArray]:
    """Of all changes of one request, the `count` that lose least; request, family and length."""
    requests, families, lengths = priced[0].shape
    worth = np.empty((families, lengths))
    losses, changes = np.full(count, np.inf), np.zeros((count, 3), dtype=np.int64)
    for r in range(requests):
        _respond(priced, state, r, worth)
        held = worth[state[0][r], state[1][r]]
        worth[state[0][r], state[1][r]] = -np.inf
        if state[1][r] == 0:
            worth[:, 0] = -np.inf
        for f in range(families):
            for n in range(min(f, 1), lengths):
                loss = held - worth[f, n]
                k = count - 1
                if loss >= losses[k]:
                    continue
                while k > 0 and losses[k - 1] > loss:
                    losses[k] = losses[k - 1]
                    changes[k] = changes[k - 1]
                    k -= 1
                losses[k] = loss
                changes[k, 0], changes[k, 1], changes[k, 2] = r, f, n
    return losses, changes


@compiled(f"bool_({PRICED}, {STATE}, int64)")
def kick(priced: Priced, state: State, tries: int) -> bool:
    """Make the `tries` changes that lose least, each followed by the others' responses.

    Keeps the first that ends in a better plan; whether there was one.
    """
    if tries == 0:
        return False
    losses, changes = _least_losses(priced, state, tries)
    tried = blank(priced)
    for k in range(tries):
        if losses[k] == np.inf:
            return False
        adopt(tried, state)
        r = changes[k, 0]
        assign(priced, tried, r, changes[k, 1], changes[k, 2])
        followed = _respond_best(priced, tried, r)
        if followed == 0.0:  # nobody responds: the change would be taken back
            continue
        if followed - losses[k] + settle(priced, tried, r) > 2.0 * _LEAST:
            adopt(state, tried)
            return True
    return False


@compiled(f"bool_({PRICED}, {STATE})")
def shift(priced: Priced, state: State) -> bool:
    """Move all requests of a family at once: to fewer or more tokens, or to another family.

    Keeps the first move that ends in a better plan; whether there was one.
    """
    own, room = priced[0], len(priced[1]) - 1
    requests, families, lengths = own.shape
    before = value(priced, state)
    tried = blank(priced)
    for f in range(families):
        for g in range(families):
            for step in range(-1, 2):
                if f == g and step == 0:
                    continue
                adopt(tried, state)
                is_moved = False
                for r in range(requests):
                    n = min(max(state[1][r] + step, 0), lengths - 1)
                    if state[0][r] != f or (state[1][r] == 0 and step < 1):
                        continue
                    while own[r, g, n] < -1e20 or tried[5][0] + n - state[1][r] > room:
                        n -= 1
                    assign(priced, tried, r, g, n)
                    is_moved = True
                if is_moved:
                    _respond_best(priced, tried, -1)
                    settle(priced, tried, 0)
                    if value(priced, tried) > before + 2.0 * _LEAST:
                        adopt(state, tried)
                        return True
    return False
