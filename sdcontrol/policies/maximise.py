"""The plan of most expected tokens per second.

Knows nothing of views, names or learning: a `Problem` in, an arm and a length per request out.

With `rate` the price of a second in tokens, the best plan maximises `gain - rate * step`; at the
best ratio of gain to step that maximum is zero (Dinkelbach 1967), so the ratio is improved until it
stays. Four couplings tie the requests of a step together:

    drafting rounds   shared by a family: a round costs `base` however few draft in it
    padding           to the longest draft, shared by all: like a round in which every family drafts
    verification      any monotone function of the tokens of the step, staircases included
    free KV slots     the end of the table of verification costs

At a given rate a plan is opened (`opening`) and requests respond to one another until none changes
(`search`). Few requests leave more to chance, and less to compute: they get more kicks, and open any numbers of
rounds (`all_rounds`).
Where one arm and one length for all would be better than what came of it, requests respond to that; of a
single request, that is the best plan.
"""

import numpy as np

from sdcontrol.compiled import compiled
from sdcontrol.errors import PlanError
from sdcontrol.policies.all_rounds import is_small, open_rounds
from sdcontrol.policies.filling import NEVER
from sdcontrol.policies.opening import open_plan
from sdcontrol.policies.plan_state import PRICED, STATE, Priced, State, blank, reprice, seat
from sdcontrol.policies.problem import TABLES, Answer, IntArray, Problem, Tables
from sdcontrol.policies.search import kick, settle, shift

__all__ = ["maximise", "search"]

_NO_TIME = 1e-12  # seconds: what takes no longer has no rate
_CLOSE = 0.01  # of the rate: moved by less, it leaves the rounds open that were
_MOST_CLIMBS = 5
_MOST_KICKS = 8
_EFFORT = 150_000  # over the square of the options in a problem: changes to try by kicks
_MOST_TRIES = 16  # of those
_LEAST = 1e-9  # tokens by which a plan must be better


def maximise(problem: Problem, rate: float | None = None) -> Answer:
    """The best plan found: of `gain / seconds`, or of `gain - rate * seconds` at a given rate.

    Raises `PlanError` where the problem holds a number that is not finite, or a step that takes no time, or
    not a row of rounds for each family and one more.
    """
    rows = len(problem.rounds), len(problem.drafted), int(problem.family[-1]) + 2
    if len(set(rows)) > 1:
        raise PlanError(f"rounds and drafted have {rows[:2]} rows; {rows[2]} are families and one")
    answer = Answer(*search(problem.tables, rate or 0.0, rate is not None))
    if answer.seconds < 0.0:
        raise PlanError(
            "survival or cost is not finite, or a step takes no time; a belief must hold finite numbers "
            "only, and its steps take seconds"
        )
    return answer


@compiled(f"{PRICED}({TABLES}, float64)")
def _price(tables: Tables, rate: float) -> Priced:
    """The problem in tokens, at `rate` tokens per second."""
    gain, limit, family, verify, rounds, reading, catch_up, drafted = tables
    arms, requests, lengths = gain.shape
    own = np.full((requests, len(rounds) - 1, lengths), NEVER)
    for a in range(arms):
        f = family[a]
        for r in range(requests):
            brings, best = gain[a, r], own[r, f]
            fixed, each = rate * catch_up[a, r], rate * reading[a, r]
            best[0] = 0.0
            for n in range(1, limit[a, r] + 1):
                best[n] = max(best[n], brings[n] - fixed - each * max(n - drafted[f], 0))
    return own, rate * verify, rate * rounds, drafted


@compiled(f"Tuple((int64[::1], float64, float64))({TABLES}, {STATE}, float64)")
def _evaluate(tables: Tables, state: State, rate: float) -> tuple[IntArray, float, float]:
    """The arm of each request, and the expected tokens and seconds of the plan."""
    gain, limit, family, verify, rounds, reading, catch_up, drafted = tables
    length, drafting = state[1], state[2]
    arm = np.zeros(len(length), dtype=np.int64)
    total, seconds = float(len(arm)), verify[state[5][0]]
    for r in range(len(arm)):
        n, best = length[r], -np.inf
        if n == 0:
            continue
        more_gain = more_seconds = 0.0
        for a in range(len(family)):
            if family[a] == state[0][r] and n <= limit[a, r]:
                spent = catch_up[a, r] + reading[a, r] * max(n - drafted[family[a]], 0)
                if gain[a, r, n] - rate * spent > best:
                    best, arm[r] = gain[a, r, n] - rate * spent, a
                    more_gain, more_seconds = gain[a, r, n], spent
        total += more_gain
        seconds += more_seconds
    for f in range(len(rounds)):
        for j in range(drafted[f] + 1, drafting.shape[1]):
            seconds += rounds[f, drafting[f, j]]
    return arm, total, seconds


@compiled(f"Tuple((float64, float64, int64, int64, boolean))({TABLES})", is_inlined=True)
def _uniform(tables: Tables) -> tuple[float, float, int, int, bool]:
    """Tokens and seconds of the best plan of one arm and one length for all; which they are; whether all is finite.

    As if nobody's limit were shorter: of a single request it is the best plan.
    """
    gain, _, family, verify, rounds, reading, catch_up, drafted = tables
    arms, requests, lengths = gain.shape
    done, padding = drafted[-1], rounds[-1, requests]
    tokens, seconds, best_arm, best_length = float(requests), verify[0], 0, 0
    total, everything = np.zeros(lengths), verify.sum() + rounds.sum()
    for a in range(arms):
        f, fixed, own = family[a], 0.0, 0.0
        total[:] = float(requests)
        for r in range(requests):
            fixed += catch_up[a, r]
            own += reading[a, r]
            for n in range(lengths):
                total[n] += gain[a, r, n]
        everything += total.sum() + fixed + own
        for n in range(1, min(lengths, (len(verify) - 1) // requests + 1)):
            more = (rounds[f, requests] + own) * max(n - drafted[f], 0) + padding * max(n - done, 0)
            spent = verify[n * requests] + fixed + more
            if total[n] * seconds > tokens * spent:
                tokens, seconds, best_arm, best_length = total[n], spent, a, n
    return tokens, seconds, best_arm, best_length, bool(np.isfinite(everything))


@compiled(f"{STATE}({TABLES}, float64, int64, int64)")
def _open_alike(tables: Tables, rate: float, a: int, n: int) -> State:
    """What comes of arm `a` and up to `n` tokens for all."""
    priced = _price(tables, rate)
    state = blank(priced)
    family, length = np.full(len(state[0]), tables[2][a]), np.minimum(tables[1][a], n)
    seat(priced, state, family, length)
    settle(priced, state, 0)
    return state


@compiled(f"{STATE}({PRICED}, int64[::1], float64)")
def _open_once(priced: Priced, caps: IntArray, token_price: float) -> State:
    """The opening from `caps`, settled."""
    state = blank(priced)
    open_plan(priced, state, token_price, caps)
    settle(priced, state, 0)
    return state


@compiled(f"float64({TABLES}, Tuple(({STATE}, float64, {PRICED})), bool_, int64)")
def _polish(
    tables: Tables, climbed: tuple[State, float, Priced], is_given: bool, tries: int
) -> float:
    """Kick what `_climb` found until nothing helps; the rate that it ends at."""
    best, rate, priced = climbed
    if tries == 0:
        return rate
    for _ in range(_MOST_KICKS):
        if not kick(priced, best, tries):
            break
        if not is_given:
            _, tokens, seconds = _evaluate(tables, best, rate)
            rate = tokens / seconds
            priced = _price(tables, rate)
            reprice(priced, best)
            settle(priced, best, 0)
    return rate


@compiled(f"Tuple(({STATE}, float64, {PRICED}))({TABLES}, float64, bool_)")
def _climb(tables: Tables, rate: float, is_given: bool) -> tuple[State, float, Priced]:
    """Open, at better and better rates; the plan, the last rate, and the problem at that."""
    verify = tables[3]
    token_seconds = (verify[-1] - verify[0]) / (len(verify) - 1)
    caps = np.full(len(tables[4]) - 1, -1)
    priced = _price(tables, rate)
    best, tokens, seconds = blank(priced), float(priced[0].shape[0]), verify[0]
    for _ in range(1 if is_given else _MOST_CLIMBS):
        tried = _open_once(priced, caps, rate * token_seconds)
        _, tried_tokens, tried_seconds = _evaluate(tables, tried, rate)
        price = rate if is_given else tokens / seconds
        if tried_tokens - tokens > price * (tried_seconds - seconds):
            best, tokens, seconds = tried, tried_tokens, tried_seconds
        if not is_given:
            before, rate = rate, tokens / seconds
            priced = _price(tables, rate)
            if abs(rate - before) <= _CLOSE * before:
                break
    if not is_given:
        reprice(priced, best)
        settle(priced, best, 0)
    return best, rate, priced


@compiled(
    f"Tuple(({STATE}, float64))({TABLES}, Tuple(({STATE}, float64, float64)), float64, bool_)"
)
def _open_more(
    tables: Tables, plan: tuple[State, float, float], rate: float, is_given: bool
) -> tuple[State, float]:
    """The best of `plan` and what comes of any numbers of rounds, and of all requests of a family that move at
    once; and the rate that it was found at.
    """
    best, tokens, seconds = plan
    for _ in range(_MOST_CLIMBS):
        price = rate if is_given else tokens / seconds
        priced = _price(tables, price)
        opened = open_rounds(priced, best)
        for _ in range(_MOST_KICKS):
            if not (shift(priced, opened) or kick(priced, opened, _MOST_TRIES)):
                break
        _, more_tokens, more_seconds = _evaluate(tables, opened, price)
        if more_tokens - tokens <= price * (more_seconds - seconds) + _LEAST:
            break
        best, tokens, seconds, rate = opened, more_tokens, more_seconds, price
        if is_given:
            break
    return best, rate


@compiled(f"Tuple((int64[::1], int64[::1], float64, float64))({TABLES}, float64, bool_)")
def search(tables: Tables, rate: float, is_given: bool) -> tuple[IntArray, IntArray, float, float]:
    """Arms, lengths, tokens and seconds; negative seconds where there is no rate."""
    requests, families, lengths = tables[0].shape[1], len(tables[4]) - 1, tables[0].shape[2]
    tokens, seconds, a, n, is_finite = _uniform(tables)
    if not (is_finite and seconds > _NO_TIME):
        nobody = np.zeros(requests, dtype=np.int64)
        return nobody, nobody, 0.0, -1.0
    if len(tables[3]) == 1 or (requests == 1 and not is_given):  # nothing to draft, or all in one
        return np.full(requests, a), np.full(requests, n), tokens, seconds
    alike = tokens / seconds
    rate = rate if is_given else alike
    tries = _EFFORT // (requests * families * lengths) ** 2 if requests > 1 else 0
    climbed = _climb(tables, rate, is_given)
    best, found = climbed[0], _polish(tables, climbed, is_given, min(tries, _MOST_TRIES))
    arm, tokens, seconds = _evaluate(tables, best, found)
    if tries and is_small((requests, families, lengths), len(tables[3]) - 1):
        best, found = _open_more(tables, (best, tokens, seconds), found, is_given)
        arm, tokens, seconds = _evaluate(tables, best, found)
    if not is_given and tokens < alike * seconds:
        other = _open_alike(tables, alike, a, n)
        other_arm, other_tokens, other_seconds = _evaluate(tables, other, alike)
        if other_tokens * seconds > tokens * other_seconds:
            best, arm, tokens, seconds = other, other_arm, other_tokens, other_seconds
    return arm, best[1], tokens, seconds
