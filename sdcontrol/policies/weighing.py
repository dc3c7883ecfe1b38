"""What a token of each request is worth in a step, by the pace that requests have: loops, compiled.

Where others take the places of those that end (`followed`), what counts is how soon a request gets through its
text, whose easy parts go by in few steps anyway: a draft there saves less of what is to come than it
seems to. With `fixed` the seconds of a step without drafts over its requests, and `each` those of a draft token,
a part of the text takes its tokens times `(fixed + each * n) / tokens per step of n drafts`, so that
each part has a best draft of its own, whatever the others do, and a token there is worth that many seconds. A
request that is quicker than others everywhere has a larger `fixed`, in proportion: its steps bring more. For
one request alone, and where all are in equally easy places, this is the most tokens per second of the step.

Where nobody follows, a batch ends with its slowest request: what others gain beyond its pace saves
nothing but their own part of the steps. With `fixed` the seconds of a step whatever its tokens, and `each`
those that a request adds, the rest of the batch takes about `fixed * (steps of the last request) + each *
(steps of all requests)`; a token of request r saves `(fixed * P(r is the last) + each) / (tokens per
step of r)` seconds of that. Who is the last is uncertain, since text that is hard to draft may be followed by text
that is not: in proportion to a power of the steps that remain. And of what a draft token saves of the steps of the last request
less is `kept` than of a token that comes anyway: whoever turns out to be the last gained less than was foreseen, most of all
by drafters that bring little to some. All is learnt (`stragglers`, `last_gains`): whoever says more slows requests down
that are the last ones later.

Knows nothing of who leaves and who comes (`worth` does), of drafters but their families, or of how the best plan is found.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from sdcontrol.compiled import compiled
from sdcontrol.core import FloatArray, family_of
from sdcontrol.policies.problem import TABLES, Answer, IntArray, Problem, Tables

__all__ = ["SAME", "TOLD", "Pace", "Told", "steps_left", "tokens_of", "weigh", "weigh_all"]

Told = tuple[FloatArray, FloatArray, tuple[float, float, float, float, float, float], FloatArray]
"""A pace, with the share that is kept by the index of a family."""
TOLD = "Tuple((float64[::1], float64[::1], UniTuple(float64, 6), float64[::1]))"


class Pace(NamedTuple):
    """How requests decode, how long they still do, and who comes after them."""

    steps: FloatArray  # by request, at which it came
    came: FloatArray  # tokens that remained then
    numbers: tuple[float, float, float, float, float, float]
    # ^ the present step; tokens and drafts of the average request's step; the share of requests that are followed
    # by others; how sharply steps that remain say who is the last, and the share of a gain that the last one keeps
    kept: Mapping[str, float]  # of that, the share by family, if not all

    def told(self, families: Sequence[str]) -> Told:
        """The same to compiled loops."""
        kept = np.array([self.kept.get(family, 1.0) for family in families])
        return self.steps, self.came, self.numbers, kept


_NOBODY: FloatArray = np.zeros(0)
SAME = Pace(_NOBODY, _NOBODY, (0.0, 1.0, 0.0, 1.0, 1.0, 1.0), {})
"""Of requests whose tokens are worth the same."""

_OWN_STEPS = 2.0  # at the average pace, which a request's own steps are added to, if nobody follows
_PLACE_STEPS = 16.0  # the same, if somebody does
_FORESEEN_TOKENS = 256.0  # that come at a request's own pace, those after them at the average one


def weigh_all(problem: Problem, least: float, remaining: IntArray, pace: Pace) -> Problem:
    """The problem in tokens of the average request; `least` is the seconds of a step of one token."""
    told = pace.told(tuple(dict.fromkeys(map(family_of, problem.arms))))
    return problem._replace(gain=weigh(problem.tables, least, remaining, told))


def tokens_of(problem: Problem, answer: Answer) -> float:
    """Expected tokens of a plan, each counted as one."""
    rows = np.arange(problem.batch)
    return problem.batch + float(problem.gain[answer.arm, rows, answer.length].sum())


@compiled(f"float64[::1](int64[::1], {TOLD}, float64)", is_inlined=True)
def _speeds(remaining: IntArray, told: Told, own_steps: float) -> FloatArray:
    """Tokens per step of each request so far, after as many steps at the average pace."""
    steps, came, (now, tokens, _, _, _, _), _ = told
    speed = np.empty(len(steps))
    for r in range(len(steps)):
        own = max(came[r] - remaining[r], 0.0) + own_steps * tokens  # a name may be used again
        speed[r] = own / (max(now - steps[r], 0.0) + own_steps)
    return speed


@compiled(f"float64[::1](float64[::1], int64[::1], {TOLD})", is_inlined=True)
def _left(speed: FloatArray, remaining: IntArray, told: Told) -> FloatArray:
    """By request: the steps that it takes to its end, the next tokens at its own pace."""
    tokens, left = told[2][1], np.empty(len(remaining))
    for r in range(len(remaining)):
        foreseen = min(float(remaining[r]), _FORESEEN_TOKENS)
        left[r] = foreseen / speed[r] + (remaining[r] - foreseen) / tokens
    return left


@compiled(f"float64[::1](int64[::1], {TOLD})")
def _steps_left(remaining: IntArray, told: Told) -> FloatArray:
    return _left(_speeds(remaining, told, _OWN_STEPS), remaining, told)


def steps_left(remaining: IntArray, pace: Pace) -> FloatArray:
    """By request: how many it takes to its end."""
    return np.asarray(_steps_left(remaining, pace.told(())))


@compiled(
    f"UniTuple(float64[::1], 2)(Tuple((float64[::1], float64)), int64[::1], {TOLD})",
    is_inlined=True,
)
def _to_the_end(
    seconds: tuple[FloatArray, float], remaining: IntArray, told: Told
) -> tuple[FloatArray, FloatArray]:
    """By request what a token is worth if nobody follows: if it is the last one's, and in any case; 1 on average."""
    _, _, (_, tokens, drafts, _, sharpness, kept), _ = told
    (verify, least), batch = seconds, len(remaining)
    used = min(int(drafts * batch + 0.5), len(verify) - 1)
    token = max(verify[used] - least, 0.0) / max(
        used + batch - 1, 1
    )  # as requests end, all of them
    each = np.full(batch, token * (1.0 + drafts) / tokens)
    fixed = max(verify[used] - token * (used + batch), 0.0)
    speed = _speeds(remaining, told, _OWN_STEPS)
    chances = _left(speed, remaining, told) ** sharpness
    last = fixed * chances / chances.sum() / speed
    mean = (last + each).mean()
    if not mean > 0.0:
        return np.zeros(batch), np.ones(batch)
    return kept * last / mean, each / mean


@compiled(f"Tuple((float64, int64))({TABLES}, int64, Tuple((float64, float64)))", is_inlined=True)
def _best_alone(tables: Tables, r: int, seconds: tuple[float, float]) -> tuple[float, int]:
    """Least seconds per token of request r, as if all were like it, and the draft tokens of that."""
    gain, limit, family, _, rounds, reading, catch_up, drafted = tables
    fixed, each = seconds
    batch, best, length = gain.shape[1], fixed, 0
    for a in range(len(family)):
        round_seconds = (rounds[family[a], batch] + rounds[-1, batch]) / batch + reading[a, r]
        for n in range(1, limit[a, r] + 1):
            drafting = round_seconds * max(n - drafted[family[a]], 0) + catch_up[a, r]
            found = (fixed + each * n + drafting) / (1.0 + gain[a, r, n])
            if found < best:
                best, length = found, n
    return best, length


@compiled(f"float64[::1]({TABLES}, float64[::1])", is_inlined=True)
def _on_the_way(tables: Tables, speed: FloatArray) -> FloatArray:
    """By request what its tokens are worth if others follow, 1 on average."""
    verify, batch = tables[3], len(speed)
    worth, most = np.empty(batch), len(verify) - 1
    fixed = verify[0] / batch * speed / speed.mean()
    # By the average price of all tokens that there is room for, then of those used.
    for _ in range(2):
        each, used = max(verify[most] - verify[0], 0.0) / most, 0
        for r in range(batch):
            worth[r], length = _best_alone(tables, r, (fixed[r], each))
            used += length
        most = max(min(used, len(verify) - 1), 1)
    return np.asarray(worth / worth.mean())


@compiled(f"float64[:,:,::1]({TABLES}, float64, int64[::1], {TOLD})", is_inlined=True)
def weigh(tables: Tables, least: float, remaining: IntArray, told: Told) -> FloatArray:
    """Expected tokens `[arms, requests, lengths]`, in those of the average request."""
    gain, family, verify = tables[0], tables[2], tables[3]
    steps, _, (_, tokens, _, followed, _, _), kept = told
    if len(steps) == 0 or tokens <= 0.0 or len(verify) < 2:
        return gain
    last, anyway = np.zeros(len(steps)), np.zeros(len(steps))
    if followed < 1.0:
        ends = _to_the_end((verify, least), remaining, told)
        last += (1.0 - followed) * ends[0]
        anyway += (1.0 - followed) * ends[1]
    if followed > 0.0:
        anyway += followed * _on_the_way(tables, _speeds(remaining, told, _PLACE_STEPS))
    scaled = np.empty_like(gain)
    for a in range(len(family)):
        for r in range(len(steps)):
            scaled[a, r] = gain[a, r] * (kept[family[a]] * last[r] + anyway[r])
    return scaled
