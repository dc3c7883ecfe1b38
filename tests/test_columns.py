"""Facts about views as columns, and about the compiled loops that run over them."""

import dataclasses
import math
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdcontrol.columns import NO_LIMIT, NO_MATCH, columns_of
from sdcontrol.compiled import is_compiling
from sdcontrol.core import (
    BatchView,
    Choice,
    FloatArray,
    Hint,
    Observation,
    Plan,
    RequestView,
    Timing,
    family_of,
)
from sdcontrol.errors import ObservationError
from sdcontrol.estimators import (
    acceptance,
    averages,
    confidence,
    evidence,
    forward,
    hints,
    learning,
    loads,
    regression,
    staircase,
)
from sdcontrol.estimators.acceptance import AcceptanceEstimator
from sdcontrol.estimators.cost import OnlineCost

ARMS = ("ngram", "sparse_kv:512", "sparse_kv:64", "draft_model")
COMPILED: tuple[ModuleType, ...] = (
    acceptance,
    averages,
    confidence,
    evidence,
    forward,
    hints,
    learning,
    loads,
    regression,
    staircase,
)

counts = st.one_of(st.none(), st.integers(-2, 40))
some_hints = st.builds(
    Hint, counts, counts, st.one_of(st.none(), st.floats(0.0, 1.0)), st.integers(0, 9)
)
some_requests = st.builds(
    RequestView,
    id=st.text(max_size=3),
    context_tokens=st.integers(0, 1 << 40),
    generated_tokens=st.just(0),
    remaining_tokens=st.integers(0, 1 << 40),
    drafters=st.lists(st.sampled_from(ARMS), max_size=4, unique=True).map(tuple),
    hints=st.dictionaries(st.sampled_from(ARMS), some_hints),
)


def or_missing(value: int | None, missing: int) -> int:
    return missing if value is None else value


@given(st.lists(some_requests, max_size=6).map(tuple))
def test_columns_say_what_the_requests_say(requests: tuple[RequestView, ...]) -> None:
    columns = columns_of(BatchView(0, requests, 100))
    assert set(columns.arms) == {arm for request in requests for arm in request.drafters}
    for r, request in enumerate(requests):
        assert columns.context_tokens[r] == request.context_tokens
        assert columns.remaining_tokens[r] == request.remaining_tokens
        for a, arm in enumerate(columns.arms):
            hint = request.hints.get(arm, Hint())
            assert columns.is_allowed[a, r] == (arm in request.drafters)
            assert columns.max_draft_tokens[a, r] == max(
                or_missing(hint.max_draft_tokens, NO_LIMIT), 0
            )
            assert columns.match_tokens[a, r] == max(
                or_missing(hint.match_tokens, NO_MATCH), NO_MATCH
            )
            assert columns.catch_up_tokens[a, r] == hint.catch_up_tokens
            known = math.nan if hint.confidence is None else hint.confidence
            np.testing.assert_equal(columns.confidence[a, r], known)


def test_columns_are_read_once_and_are_no_part_of_the_view() -> None:
    view, same = (BatchView(3, (RequestView("a", 5, 0, 9),), 7) for _ in range(2))
    columns = columns_of(view)
    assert columns_of(view) is columns
    assert view == same
    assert repr(view) == repr(same)


def drawn_step(rng: np.random.Generator, step: int) -> tuple[BatchView, Observation]:
    """Some of eight requests, with every kind of hint, draft, shadow, confidence and tree."""
    names = rng.choice(8, size=rng.integers(1, 7), replace=False).tolist()
    requests = tuple(
        RequestView(
            str(name),
            int(rng.integers(1, 4000)),
            step,
            1000,
            drafters=ARMS if rng.random() < 0.8 else ARMS[:2],
            hints={
                "ngram": Hint(int(rng.integers(0, 9)), int(rng.integers(0, 30))),
                "draft_model": Hint(confidence=float(rng.random()), catch_up_tokens=name),
            },
        )
        for name in names
    )
    view = BatchView(step, requests, 1000)
    choices = tuple(
        Choice.of(request.drafters[rng.integers(0, len(request.drafters))], int(rng.integers(0, 7)))
        for request in requests
    )
    drafted = tuple(choice.num_draft_tokens for choice in choices)
    proposed = tuple(int(rng.integers(0, n + 1)) for n in drafted)
    accepted = tuple(int(rng.integers(0, n + 1)) for n in proposed)
    nodes = tuple(
        tuple(range(1, n + 1))
        if choice.drafter == "sparse_kv:64" and step > 10 and n < most
        else tuple(range(n))
        for choice, n, most in zip(choices, accepted, proposed, strict=True)
    )
    families = {family_of(c.drafter): float(rng.uniform(1e-3, 2e-3)) for c in choices if c.drafter}
    observation = Observation(
        view,
        Plan(choices),
        drafted,
        proposed,
        accepted,
        tuple(count + 1 for count in accepted),
        Timing(families, float(rng.uniform(0.01, 0.02)), 1e-4, 1e-3),
        accepted_nodes=nodes if step % 2 else None,
        confidence=tuple(tuple(rng.random(n).tolist()) for n in drafted) if step % 3 else None,
        shadow={"ngram": tuple(None if rng.random() < 0.2 else 2 for _ in drafted)},
    )
    return view, observation


def beliefs(steps: int) -> list[FloatArray]:
    """All that is believed and priced over a drawn history."""
    rng, believed = np.random.default_rng(0), list[FloatArray]()
    estimator, cost = AcceptanceEstimator(), OnlineCost(token_edges=(8, 16, 64))
    for step in range(steps):
        view, observation = drawn_step(rng, step)
        survival = estimator.survival(view)
        known = observation.confidence or ()
        conditioned = estimator.condition(view, observation.plan, known, survival)
        believed += [*survival.values(), *conditioned.values()]
        believed.append(cost.verify_seconds(np.arange(1.0, 90.0), 4000.0 + step, 4))
        believed += [cost.draft_seconds(family_of(arm), 3, 5000) for arm in ARMS]
        estimator.update(observation)
        cost.update(observation)
    return believed


@pytest.mark.skipif(not is_compiling, reason="numba is not installed: nothing is compiled")
def test_compiled_loops_do_what_their_python_does(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = beliefs(30)
    num_replaced = 0
    for module in COMPILED:
        for name, function in list(vars(module).items()):
            if hasattr(function, "py_func"):
                monkeypatch.setattr(module, name, function.py_func)
                num_replaced += 1
    assert num_replaced >= 20
    for fast, plain in zip(compiled, beliefs(30), strict=True):
        np.testing.assert_allclose(fast, plain, rtol=1e-9, atol=1e-15)


def test_the_same_observations_give_the_same_beliefs_to_the_last_bit() -> None:
    for first, second in zip(beliefs(25), beliefs(25), strict=True):
        np.testing.assert_array_equal(first, second)


def test_an_observation_must_fit_its_view() -> None:
    view, observation = drawn_step(np.random.default_rng(5), 0)
    estimator, batch = AcceptanceEstimator(), len(view.requests)
    before = estimator.survival(view)
    for name in ("drafted", "proposed", "accepted", "emitted"):
        fields = {
            f.name: getattr(observation, f.name) for f in dataclasses.fields(Observation) if f.init
        }
        fields[name] = (*fields[name], 1)
        with pytest.raises(ObservationError, match=f"{batch + 1} entries in {name} for {batch}"):
            estimator.update(Observation(**fields))
    for arm, rows in estimator.survival(view).items():
        np.testing.assert_array_equal(rows, before[arm])
