"""Contract checks for policies: import them in your tests and run them on your own.

    check_policy(policies.build({"kind": "mine"}))

Knows nothing of how a policy decides. Views, beliefs and observations are drawn from a seed, so a
failure repeats. Raises `AssertionError` that names the broken rule.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from sdcontrol.answers import check_plan, check_shorter
from sdcontrol.core import (
    BatchView,
    Belief,
    Confidence,
    FloatArray,
    Hint,
    Observation,
    Plan,
    RequestView,
    Timing,
)
from sdcontrol.errors import PlanError
from sdcontrol.policies.base import Policy, Refiner

__all__ = ["ToyCost", "check_policy", "random_belief", "random_observation", "random_view"]

_ARMS = ("ngram", "sparse_kv:512", "sparse_kv:2048", "draft_model")


class ToyCost:
    """A cost with a memory-bound plateau, a staircase and a price per drafting round."""

    def verify_seconds(
        self, num_tokens: FloatArray | float, kv_tokens: FloatArray | float, num_requests: int
    ) -> FloatArray:
        """Flat up to 16 tokens, then by steps of 8."""
        steps = np.ceil(np.maximum(np.asarray(num_tokens) - 16.0, 0.0) / 8.0)
        return np.asarray(4e-3 + 4e-4 * steps + 1e-8 * np.asarray(kv_tokens))

    def draft_seconds(
        self, family: str, num_requests: FloatArray | float, kv_tokens: FloatArray | float
    ) -> FloatArray:
        """Free for `ngram`."""
        base = 0.0 if family == "ngram" else 5e-4
        each = 0.0 if family == "ngram" else 1e-5
        per_token = 0.0 if family == "ngram" else 1e-9
        return np.asarray(
            base + each * np.asarray(num_requests) + per_token * np.asarray(kv_tokens)
        )

    def overhead_seconds(self) -> float:
        """A tenth of a millisecond."""
        return 1e-4

    def catch_up_seconds(self, family: str, num_tokens: int) -> float:
        """Ten microseconds per token."""
        return 1e-5 * num_tokens


def check_policy(policy: Policy, seed: int = 0, rounds: int = 60) -> None:
    """Raise `AssertionError` where `policy` breaks the contract. The policy itself is not changed.

    Plans fit their views (no requests, opted-out requests, one remaining token, no free KV, hints
    that allow nothing), and what the policy says of itself (`drafts`, `uses_belief`); planning and refining
    change nothing, what they are given included, and repeat; any valid observation is accepted, steps in
    which something else was done than planned included, and left as it was; a clone is independent;
    refining only drops suffixes, whatever is known of drafts. An error that the policy raises is its cause.
    """
    generator = np.random.default_rng(seed)
    with _asked("clone"):
        tried, twin = policy.clone(), policy.clone()
    assert type(tried) is type(policy), "clone() returned another type"
    for step in range(rounds):
        view, other = random_view(generator, step), random_view(generator, step)
        belief = random_belief(generator, view)
        with _asked("plan"):
            twin.plan(other, random_belief(generator, other))  # which must not matter to it
        plan = _check_plan(tried, twin, view, belief)
        drafted = [choice.num_draft_tokens for choice in plan.choices]
        confidence = tuple(tuple(generator.uniform(0, 1, n).tolist()) for n in drafted)
        submitted = _check_refine(tried, view, plan, confidence, belief)
        observation = random_observation(generator, view, plan, submitted, confidence)
        observation = _as_it_may_come(generator, observation)
        _check_clone(tried, view, belief, observation)
        for told in (tried, twin):
            with _asked("update", observation):
                told.update(observation)


def random_view(generator: np.random.Generator, step: int) -> BatchView:
    """A view of 0 to 12 requests, corners included."""
    count = int(generator.choice([0, 1, 2, 5, 12], p=[0.1, 0.2, 0.2, 0.3, 0.2]))
    requests = tuple(_random_request(generator, f"r{step % 3}.{i}") for i in range(count))
    free = int(generator.choice([0, 1, 3, 1000], p=[0.1, 0.1, 0.1, 0.7]))
    prefill = int(generator.choice([0, 64], p=[0.8, 0.2]))
    return BatchView(step=step, requests=requests, free_kv_tokens=free, prefill_tokens=prefill)


def random_belief(generator: np.random.Generator, view: BatchView, depth: int = 6) -> Belief:
    """Survival of every arm that the view offers, 0 where a request may not use it."""
    survival = {}
    for arm in _ARMS:
        allowed = np.array([arm in request.drafters for request in view.requests], dtype=bool)
        hazards = generator.uniform(0.05, 1.0, (len(view.requests), depth))
        if allowed.any():
            survival[arm] = np.cumprod(hazards, axis=1) * allowed[:, None]
    return Belief(survival=survival, cost=ToyCost())


def random_observation(
    generator: np.random.Generator,
    view: BatchView,
    plan: Plan,
    submitted: Plan | None = None,
    confidence: tuple[tuple[float, ...], ...] | None = None,
) -> Observation:
    """Something that may come of `plan`, shortened to `submitted` by refinement."""
    drafted = tuple(choice.num_draft_tokens for choice in plan.choices)
    proposed = tuple(choice.num_draft_tokens for choice in (submitted or plan).choices)
    accepted = tuple(int(generator.integers(0, n + 1)) for n in proposed)
    emitted = tuple(
        min(n + 1, request.remaining_tokens)
        for n, request in zip(accepted, view.requests, strict=True)
    )
    shadow = tuple(
        int(generator.integers(0, 5)) if generator.random() < 0.5 else None for _ in view.requests
    )
    draft_seconds = {"draft_model": float(generator.exponential(1e-3))}
    verify = float(generator.choice([generator.exponential(5e-3), 0.0], p=[0.9, 0.1]))
    return Observation(
        view=view,
        plan=plan,
        drafted=drafted,
        proposed=proposed,
        accepted=accepted,
        emitted=emitted,
        timing=Timing(draft_seconds=draft_seconds, verify_seconds=verify),
        confidence=confidence,
        shadow={"ngram": shadow} if generator.random() < 0.5 else {},
    )


def _as_it_may_come(generator: np.random.Generator, observation: Observation) -> Observation:
    """Mostly as it is; or of a drafter that says nothing, or of a step that had to do without the plan."""
    luck = generator.random()
    if luck < 0.2:
        return replace(observation, confidence=None)
    if luck < 0.3:
        view, fault = observation.view, "plan_stalled: TimeoutError: too long"
        plain = random_observation(generator, view, Plan.off(view, "policy fault: plan_stalled"))
        return replace(plain, faults=(fault,))
    return observation


def _random_request(generator: np.random.Generator, name: str) -> RequestView:
    arms = tuple(arm for arm in _ARMS if generator.random() < 0.8)
    hints = {arm: _random_hint(generator) for arm in arms if generator.random() < 0.4}
    return RequestView(
        id=name,
        context_tokens=int(generator.integers(1, 5000)),
        generated_tokens=int(generator.integers(0, 300)),
        remaining_tokens=int(generator.choice([1, 2, 4, 200], p=[0.1, 0.1, 0.1, 0.7])),
        temperature=float(generator.choice([0.0, 1.0])),
        drafters=arms if generator.random() < 0.85 else (),
        hints=hints,
    )


def _random_hint(generator: np.random.Generator) -> Hint:
    most = None if generator.random() < 0.4 else int(generator.integers(0, 5))
    return Hint(
        max_draft_tokens=most,
        match_tokens=int(generator.integers(0, 30)) if generator.random() < 0.5 else None,
        confidence=float(generator.random()) if generator.random() < 0.5 else None,
        catch_up_tokens=int(generator.choice([0, 1, 40])),
    )


@contextmanager
def _asked(method: str, *given: object) -> Iterator[None]:
    """Raises `AssertionError` where a method of the policy raises, or changes what it was given."""
    before = [_contents(one) for one in copy.deepcopy(given)]
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{method} raised {type(error).__name__}: {error}") from error
    for one, contents in zip(given, before, strict=True):
        assert _contents(one) == contents, f"{method} changed the {type(one).__name__} it was given"


def _contents(given: object) -> object:
    """What can be compared."""
    if not isinstance(given, Belief):
        return given
    return {arm: (rows.shape, rows.tobytes()) for arm, rows in given.survival.items()}


def _check_plan(policy: Policy, twin: Policy, view: BatchView, belief: Belief) -> Plan:
    """The plan; `twin` was told the same, and asked otherwise."""
    with _asked("plan", view, belief):
        plan = policy.plan(view, belief)
    try:
        check_plan(plan, view)
    except PlanError as error:
        raise AssertionError(f"plan does not fit its view: {error}") from error
    _check_hints(view, plan)
    with _asked("plan"):
        again, anew = policy.plan(view, belief), twin.plan(view, belief)
    assert again == plan, "the same state, view and belief gave another plan"
    assert anew == plan, "planning changed the policy's state"
    assert policy.drafts or plan.is_off, "a plan drafts, though the policy has drafts = False"
    if not policy.uses_belief:
        with _asked("plan without a belief"):
            blind = policy.plan(view, Belief({}, belief.cost))
        assert blind == plan, "a plan hangs on a belief, though the policy has uses_belief = False"
    return plan


def _check_hints(view: BatchView, plan: Plan) -> None:
    for request, choice in zip(view.requests, plan.choices, strict=True):
        hint = request.hints.get(choice.drafter or "")
        if hint is not None and hint.max_draft_tokens is not None:
            assert choice.num_draft_tokens <= hint.max_draft_tokens, (
                f"{choice.num_draft_tokens} draft tokens for request {request.id!r}, whose hint "
                f"allows {hint.max_draft_tokens}"
            )


def _check_refine(
    policy: Policy, view: BatchView, plan: Plan, confidence: Confidence, belief: Belief
) -> Plan:
    """The plan as refined once all is drafted."""
    if not isinstance(policy, Refiner):
        return plan
    unsaid = ((),) * len(plan.choices)  # as by drafters that do not tell
    known = [unsaid, confidence]
    if policy.refines_between_rounds:
        known.insert(0, tuple(row[:1] for row in confidence))
    for rows in known:
        refined = _refined(policy, view, plan, rows, belief)
    return refined


def _refined(
    policy: Policy, view: BatchView, plan: Plan, confidence: Confidence, belief: Belief
) -> Plan:
    assert isinstance(policy, Refiner)
    with _asked("clone"):
        before = policy.clone()
    with _asked("refine", view, plan, belief):
        refined = policy.refine(view, plan, confidence, belief)
    try:
        check_shorter(refined, plan)
    except PlanError as error:
        raise AssertionError(f"refine does not shorten its plan: {error}") from error
    with _asked("refine"):
        again = policy.refine(view, plan, confidence, belief)
        anew = before.refine(view, plan, confidence, belief)
    assert again == refined == anew, "refining changed the policy's state"
    return refined


def _check_clone(policy: Policy, view: BatchView, belief: Belief, observation: Observation) -> None:
    with _asked("clone"):
        copied = policy.clone()
    with _asked("plan"):
        plan, other = policy.plan(view, belief), copied.plan(view, belief)
    assert other == plan, "a clone plans otherwise than its original"
    with _asked("update", observation):
        for _ in range(7):  # a number that few cycles divide
            copied.update(observation)
    with _asked("plan"):
        again = policy.plan(view, belief)
    assert again == plan, "updating a clone changed its original"
