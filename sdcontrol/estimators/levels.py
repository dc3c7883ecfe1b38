"""How far a request is from its drafters' averages: one of `LEVELS`, each with a probability.

Of every (request, arm) the likelihood of its outcomes at each level is kept. Before any, its arm's
prior: normal distributions around zero, narrow to wide, mixed by weights that are learnt. So one that
is far from all others is soon known to be, while a few rejections of one that is like them remain bad
luck. Requests that decode together may all be at one level; how probable that is goes by all of their
outcomes, and by how often new ones were. Knows nothing of hints, averages or names; arrays in, changed in place.
"""

import math

import numpy as np
from numpy.typing import NDArray

from sdcontrol.compiled import compiled
from sdcontrol.core import FloatArray

__all__ = [
    "ACCEPTED",
    "ALONE",
    "DRAFTS",
    "EXCESS",
    "FIELDS",
    "FILLED",
    "FIRST_ONE_KIND",
    "FIRST_PRIOR",
    "FIRST_VARIANCE",
    "FIRST_WEIGHTS",
    "GIVEN",
    "KEPT",
    "LEVELS",
    "MEAN",
    "POPULATION",
    "RATIOS",
    "REQUESTS",
    "TESTED",
    "VARIANCE",
    "Kept",
    "Population",
    "Requests",
    "gather",
    "learn_one_kind",
    "pool",
    "rates_at",
    "remix",
    "settle",
    "tell",
    "weigh",
]

IntArray = NDArray[np.int64]

LEVELS: FloatArray = np.linspace(-4.8, 4.8, 17)  # in log-odds beside the average
RATIOS: FloatArray = np.exp(LEVELS)  # the same as a factor of the odds

_WIDTHS = np.array([0.35, 1.0, 2.2])  # standard deviations of the normal distributions
FIRST_WEIGHTS: FloatArray = np.array([0.65, 0.3, 0.05])
_LEAST_WEIGHT = 0.02
_WEIGHT_RATE = 0.015  # of what is believed of a population, per outcome
_STALE = 0.05  # of an arm's variance, after which its prior is mixed anew
FIRST_ONE_KIND = 0.25  # probability that a batch is at one level, before its outcomes are known
_LEAST_ONE_KIND, _MOST_ONE_KIND = 0.05, 0.9
_ONE_KIND_RATE = 0.04  # of what is believed of that, per time that outcomes are learnt
_STEP_ASIDE = 0.001  # probability of either neighbour of a level, per outcome
_JUMP = 0.008  # probability that a request becomes another one, per outcome
_OWN_MEMORY_TOKENS = 80.0
_LEAST_STOP = 0.02  # probability that a path ends at a node, where nodes are out of order
_LEAST_LIKELIHOOD = 1e-300  # of long drafts at levels that are out of the question

MEAN, VARIANCE = 0, 1  # of the levels, by their probabilities
GIVEN = 2  # drafts lately given to the average; 0 of a request that is new
ALONE = 3  # log of the likelihood whatever the level, on the scale of those kept
DRAFTS, FILLED = 4, 5  # that were asked for lately, and those of which something came: see `coming`
FIELDS = 6  # of the state of a (request, arm)

TESTED, ACCEPTED, EXCESS = 0, 1, 1

Requests = tuple[IntArray, FloatArray, FloatArray, FloatArray, FloatArray]
REQUESTS = (
    "Tuple((int64[::1], float64[:, :, ::1], float64[:, :, ::1], float64[:, :, ::1],"
    " float64[:, :, :, ::1]))"
)
"""Slots, `[requests]`, and by (slot, arm) likelihood and its log, `[levels]`; MEAN, VARIANCE, ...; own
counts per position, TESTED and EXCESS, `[2, K]`."""

Population = tuple[FloatArray, FloatArray, FloatArray, FloatArray]
POPULATION = "Tuple((float64[:, ::1], float64[:, ::1], float64[::1], float64[::1]))"
"""By arm: weights; the prior that they mix, `[levels]`, and its variance; the probability that a batch is
of one kind."""

Kept = tuple[Requests, Population]
KEPT = f"Tuple(({REQUESTS}, {POPULATION}))"


def _normals() -> FloatArray:
    """Each normal distribution on the levels, `[widths, levels]`."""
    density: FloatArray = np.exp(-0.5 * (LEVELS / _WIDTHS[:, None]) ** 2)
    total: FloatArray = density.sum(axis=1, keepdims=True)
    return density / total


_NORMALS = _normals()
_VARIANCES: FloatArray = _NORMALS @ LEVELS**2
FIRST_PRIOR: FloatArray = FIRST_WEIGHTS @ _NORMALS
FIRST_VARIANCE = float(FIRST_WEIGHTS @ _VARIANCES)


@compiled("void(float64[::1], float64[:, ::1])", is_inlined=True)
def rates_at(odds: FloatArray, rates: FloatArray) -> None:
    """P(accepted) at each level, `[K, levels]`, given the odds at level 0."""
    for j in range(len(odds)):
        for k in range(len(RATIOS)):
            rates[j, k] = odds[j] * RATIOS[k] / (1.0 + odds[j] * RATIOS[k])


@compiled("void(float64[::1], float64[::1])", is_inlined=True)
def _wander(likelihood: FloatArray, prior: FloatArray) -> None:
    """What a request may have done since: stepped to a neighbouring level, or become another one."""
    total = 0.0
    for k in range(len(LEVELS)):
        total += prior[k] * likelihood[k]
    last, before = len(prior) - 1, likelihood[0]
    for k in range(len(LEVELS)):
        here = likelihood[k]
        after = likelihood[k + 1] if k < last else here
        walked = here + _STEP_ASIDE * (before + after - 2.0 * here)
        likelihood[k] = (1.0 - _JUMP) * walked / total + _JUMP
        before = here


@compiled("void(float64[::1], float64[::1], float64, float64, float64)", is_inlined=True)
def _multiply(
    likelihood: FloatArray, rates: FloatArray, tested: float, accepted: float, trust: float
) -> None:
    """By the likelihood of one position's outcome, to the power of `trust`."""
    if tested == 1.0 and accepted in (0.0, 1.0) and trust in (0.5, 1.0):
        for k in range(len(LEVELS)):
            rate = rates[k] if accepted > 0.0 else 1.0 - rates[k]
            likelihood[k] *= rate if trust == 1.0 else math.sqrt(rate)
        return
    hits, misses = trust * accepted, trust * (tested - accepted)
    for k in range(len(LEVELS)):
        likelihood[k] *= rates[k] ** hits * (1.0 - rates[k]) ** misses


@compiled("void(float64[::1], float64[:, ::1], float64[:, ::1], float64)", is_inlined=True)
def _multiply_by_path(
    likelihood: FloatArray, rates: FloatArray, outcome: FloatArray, trust: float
) -> None:
    """By the likelihood of so many nodes accepted of so many, to the power of `trust`.

    Nodes stand and fall with those before them: one by one they would say the same thing many times.
    """
    tested, accepted = int(outcome[TESTED].sum()), int(outcome[ACCEPTED].sum())
    for k in range(len(LEVELS)):
        reached = rates[accepted - 1, k] if accepted else 1.0
        beyond = rates[accepted, k] if accepted < tested else 0.0
        likelihood[k] *= max(reached - beyond, _LEAST_STOP * reached) ** trust


@compiled(
    "void(Tuple((float64[::1], float64[:, ::1])), float64[::1], float64[:, ::1], float64[:, ::1],"
    " Tuple((float64, boolean)))",
    is_inlined=True,
)
def tell(
    own: tuple[FloatArray, FloatArray],  # likelihood and counts
    prior: FloatArray,
    rates: FloatArray,
    outcome: FloatArray,
    how: tuple[float, bool],
) -> None:
    """What an outcome, TESTED and ACCEPTED, `[2, K]`, says of a (request, arm): Bayes' rule.

    `how`: it counts so many times, and whether it is that of a tree. What the levels did not foresee
    at a position goes to its own counts, but where it is trusted less: hints mix different situations.
    """
    (likelihood, counts), (trust, is_tree) = own, how
    _wander(likelihood, prior)
    for j in range(outcome.shape[1]):
        tested, accepted = outcome[TESTED, j], outcome[ACCEPTED, j]
        if tested <= 0.0:
            continue
        if trust == 1.0:
            reached, expected = 0.0, 0.0
            for k in range(len(LEVELS)):
                here = prior[k] * likelihood[k]
                reached += here
                expected += here * rates[j, k]
            fade = min(1.0, _OWN_MEMORY_TOKENS / max(counts[TESTED, j] + tested, 1.0))
            counts[TESTED, j] = (counts[TESTED, j] + tested) * fade
            excess = accepted - tested * expected / reached
            counts[EXCESS, j] = (counts[EXCESS, j] + excess) * fade
        if not is_tree:
            _multiply(likelihood, rates[j], tested, accepted, trust)
    if is_tree:
        _multiply_by_path(likelihood, rates, outcome, trust)
    for k in range(len(LEVELS)):
        likelihood[k] = max(likelihood[k], _LEAST_LIKELIHOOD)


@compiled("void(float64[::1], float64[::1], float64[::1], float64[::1])", is_inlined=True)
def weigh(likelihood: FloatArray, prior: FloatArray, state: FloatArray, total: FloatArray) -> None:
    """Set MEAN and VARIANCE of a (request, arm), and add the probabilities of its levels to `total`."""
    whole, mean, square = 0.0, 0.0, 0.0
    for k in range(len(LEVELS)):
        here = prior[k] * likelihood[k]
        whole += here
        mean += here * LEVELS[k]
        square += here * LEVELS[k] ** 2
    for k in range(len(LEVELS)):
        total[k] += prior[k] * likelihood[k] / whole
    state[MEAN], state[VARIANCE] = mean / whole, square / whole - (mean / whole) ** 2


@compiled("void(float64[::1], float64[::1], float64[::1], float64[::1])", is_inlined=True)
def settle(likelihood: FloatArray, prior: FloatArray, state: FloatArray, logs: FloatArray) -> None:
    """Set what `gather` reads of a (request, arm)."""
    total = 0.0
    for k in range(len(LEVELS)):
        total += prior[k] * likelihood[k]
        logs[k] = math.log(likelihood[k])
    state[ALONE] = math.log(total)


@compiled("float64(float64[::1], float64, float64[::1], float64)", is_inlined=True)
def pool(together: FloatArray, apart: float, prior: FloatArray, one_kind: float) -> float:
    """Turn summed logs of likelihoods into the levels of requests that are all at the same one.

    How probable that is, where it was `one_kind` before; `apart` is their summed ALONE.
    """
    most, total = -np.inf, 0.0
    for k in range(len(LEVELS)):
        most = max(most, together[k])
    for k in range(len(LEVELS)):
        together[k] = prior[k] * math.exp(together[k] - most)
        total += together[k]
    for k in range(len(LEVELS)):
        together[k] /= total
    against = (1.0 - one_kind) / one_kind * np.exp(apart - most - math.log(total))
    return 1.0 / (1.0 + float(against))


@compiled(f"float64({REQUESTS}, int64, {POPULATION}, float64[::1])", is_inlined=True)
def gather(requests: Requests, arm: int, population: Population, together: FloatArray) -> float:
    """Set the levels of requests that are all at the same one; how probable that is."""
    slots, _, logs, state, _ = requests
    _, priors, _, one_kind = population
    apart = 0.0
    together[:] = 0.0
    for slot in slots:
        apart += state[slot, arm, ALONE]
        for k in range(len(LEVELS)):
            together[k] += logs[slot, arm, k]
    return float(pool(together, apart, priors[arm], one_kind[arm]))


@compiled("void(float64[::1], int64, float64, float64)", is_inlined=True)
def learn_one_kind(one_kind: FloatArray, arm: int, probability: float, share: float) -> None:
    """Follow how probable it turned out to be that a batch is of one kind: a step of EM, online.

    `share` of the requests count, those that are new.
    """
    learnt = one_kind[arm] + _ONE_KIND_RATE * share * (probability - one_kind[arm])
    one_kind[arm] = min(max(learnt, _LEAST_ONE_KIND), _MOST_ONE_KIND)


@compiled(f"boolean({POPULATION}, int64, float64[::1])", is_inlined=True)
def remix(population: Population, arm: int, total: FloatArray) -> bool:
    """Learn the weights of an arm from the summed levels of its outcomes: a step of EM, online.

    Whether its prior was mixed anew, since they say something else by now.
    """
    weights, priors, variances, _ = population
    own, outcomes = weights[arm], total.sum()
    rate, sum_of_weights, variance = 1.0 - (1.0 - _WEIGHT_RATE) ** outcomes, 0.0, 0.0
    before = own.copy()
    for c in range(len(own)):
        likely = 0.0
        for k in range(len(LEVELS)):
            mixed = 0.0
            for other in range(len(own)):
                mixed += before[other] * _NORMALS[other, k]
            likely += total[k] * before[c] * _NORMALS[c, k] / mixed
        own[c] = max(before[c] + rate * (likely / outcomes - before[c]), _LEAST_WEIGHT)
        sum_of_weights += own[c]
    for c in range(len(own)):
        own[c] /= sum_of_weights
        variance += own[c] * _VARIANCES[c]
    if abs(variance - variances[arm]) < _STALE * variances[arm]:
        return False
    variances[arm] = variance
    for k in range(len(LEVELS)):
        priors[arm, k] = 0.0
        for c in range(len(own)):
            priors[arm, k] += own[c] * _NORMALS[c, k]
    return True
