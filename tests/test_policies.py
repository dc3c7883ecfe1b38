"""Every policy keeps the contract, and is built from names, shorthands, mappings and models."""

import textwrap
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel

from sdcontrol import policies
from sdcontrol.core import (
    BatchView,
    Belief,
    Choice,
    Confidence,
    Observation,
    Plan,
    RequestView,
)
from sdcontrol.errors import ConfigError, UnknownName
from sdcontrol.policies import registry
from sdcontrol.policies.base import Policy, PolicyConfig
from sdcontrol.policies.checks import ToyCost, check_policy, random_belief, random_view
from sdcontrol.policies.static import StaticConfig


class Foreseen:
    """Accepts a number of tokens that follows from the request and where it is."""

    def accepted_tokens(self, request_id: str, generated_tokens: int, drafter: str) -> int:
        return (len(request_id) + generated_tokens + len(drafter)) % 6


SPECS: dict[str, object] = {
    "static": "static:sparse_kv:512:4",
    "oracle": {"kind": "oracle", "foresight": Foreseen()},
}


def built(name: str) -> Policy:
    return policies.build(SPECS.get(name, name))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [name for name in policies.names() if name != "learned"])
@pytest.mark.parametrize("seed", [1, 2])
def test_every_policy_keeps_the_contract(name: str, seed: int) -> None:
    check_policy(built(name), seed=seed)


def test_all_policies_of_the_design_are_registered() -> None:
    rivals = {"concurrency_schedule", "smartspec", "ema_steps", "throughput_aware"}
    rivals |= {"budget_argmax", "heuristic"}
    ours = {"off", "static", "roofline", "goodput", "oracle"}
    assert set(policies.names()) >= rivals | ours


def test_the_four_ways_to_name_a_policy_agree() -> None:
    mapping = {"kind": "static", "drafter": "sparse_kv:512", "num_draft_tokens": 4}
    config = StaticConfig(drafter="sparse_kv:512", num_draft_tokens=4)
    assert policies.parse("static:sparse_kv:512:4") == policies.parse(mapping) == config
    assert policies.parse(config) is config
    assert mapping["kind"] == "static", "the caller's mapping was changed"


@pytest.mark.parametrize(
    ("spec", "error", "says"),
    [
        ("goodputt", UnknownName, "'goodput'"),
        ({"kind": "smartspeck"}, UnknownName, "'smartspec'"),
        ({"kind": "static", "draftr": "ngram"}, ConfigError, "'drafter'"),
        ({"kind": "static", "drafter": "ngram"}, ConfigError, "num_draft_tokens"),
        ({"kind": "static", "drafter": "n", "num_draft_tokens": -1}, ConfigError, "-1"),
        ({"drafter": "ngram"}, ConfigError, "kind"),
        ("static:ngram", ConfigError, "static:DRAFTER:TOKENS"),
        ("static:ngram:many", ConfigError, "static:DRAFTER:TOKENS"),
        ("off:1", ConfigError, "'1'"),
        (3, ConfigError, "int"),
        ("static", ConfigError, "drafter and num_draft_tokens, as in static:ngram:4"),
        ("learned", ConfigError, "needs model, as in learned:policy.skops"),
        ("oracle", ConfigError, "'oracle' needs foresight"),
        ("ngram:4", UnknownName, "static:DRAFTER:TOKENS"),
    ],
)
def test_what_cannot_be_built_is_refused_with_the_nearest_valid_name(
    spec: object, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        policies.build(spec)  # type: ignore[arg-type]


def test_configs_are_frozen() -> None:
    config = policies.parse("goodput")
    with pytest.raises(ValueError, match="frozen"):
        config.probe_share = 0.5  # type: ignore[attr-defined]


def test_a_policy_field_takes_every_spec_and_writes_itself_out() -> None:
    class Run(BaseModel):
        policy: policies.PolicySpec

    run = Run(policy="static:ngram:4")  # type: ignore[arg-type]
    assert run.model_dump() == {
        "policy": {"kind": "static", "drafter": "ngram", "num_draft_tokens": 4}
    }
    assert Run.model_validate(run.model_dump()) == run


def test_the_example_in_the_docs_is_one_file_and_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "_CONFIGS", dict(registry._CONFIGS))
    assert policies.__doc__ is not None
    start = policies.__doc__.index("    from typing import Literal")
    end = policies.__doc__.index("`sdcontrol.policies.checks")
    exec(textwrap.dedent(policies.__doc__[start:end]), {"__name__": "mine"})
    check_policy(policies.build({"kind": "every_second", "drafter": "draft_model"}))


def test_a_name_is_given_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_CONFIGS", dict(registry._CONFIGS))

    class Other(PolicyConfig):
        kind: str = "off"

    with pytest.raises(ConfigError, match="taken"):
        policies.register(Other)


@pytest.mark.parametrize("wrong", [Policy, int, "mine", None, policies.parse("off")], ids=repr)
def test_what_is_registered_is_a_config(wrong: Any) -> None:
    """And not the policy that it builds, which is what comes to mind."""
    with pytest.raises(ConfigError, match=r"give a subclass of sdcontrol\.policies\.PolicyConfig"):
        policies.register(wrong)


class Careless(Policy):
    """Breaks one rule, as told."""

    def __init__(self, rule: str) -> None:
        self.rule = rule
        self.calls = 0
        self.shared: list[int] = []

    def plan(self, view: BatchView, belief: Belief) -> Plan:
        self.calls += 1
        drafter = next((r.drafters[0] for r in view.requests if r.drafters), None)
        tokens = 1 if drafter and self.breaks_now() else 0
        if self.rule == "fits" and view.requests:
            return Plan(Plan.off(view).choices[1:])
        return Plan.uniform(view, drafter, tokens) if drafter else Plan.off(view)

    def breaks_now(self) -> bool:
        return self.calls % 2 == 0 if self.rule == "state" else len(self.shared) % 2 == 1

    def update(self, observation: object) -> None:
        if self.rule == "clone":
            self.shared.append(1)
            self.shared = self.shared[-1:] if len(self.shared) > 1 else self.shared

    def clone(self) -> "Careless":
        copied = Careless(self.rule)
        copied.calls = self.calls
        copied.shared = self.shared
        return copied


@pytest.mark.parametrize("rule", ["fits", "state", "clone"])
def test_the_checks_find_a_broken_rule(rule: str) -> None:
    with pytest.raises(AssertionError):
        check_policy(Careless(rule))


class Plain(Policy):
    """Keeps the contract."""

    def plan(self, view: BatchView, belief: Belief) -> Plan:
        return Plan.uniform(view, "ngram", 2)


def halves(self: Policy, view: BatchView, belief: Belief) -> Plan:
    for rows in belief.survival.values():
        rows *= 0.5
    return Plan.off(view)


def as_list(self: Policy, view: BatchView, belief: Belief) -> Plan:
    return Plan(list(Plan.off(view).choices))  # type: ignore[arg-type]


def in_parts(self: Policy, view: BatchView, *_: object) -> Plan:
    return Plan((Choice("ngram", 1.5),) * len(view.requests))  # type: ignore[arg-type]


def forgets(self: Policy, observation: Observation) -> None:
    observation.timing.draft_seconds.clear()  # type: ignore[attr-defined]


def fails(self: Policy, *_: object) -> None:
    raise ValueError("boom")


def answers_nothing(self: Policy, *_: object) -> None: ...


def drops_a_request(self: Policy, view: BatchView, plan: Plan, *_: object) -> Plan:
    return Plan(plan.choices[:-1])


def lengthens(self: Policy, view: BatchView, plan: Plan, *_: object) -> Plan:
    return Plan(
        tuple(Choice.of(c.drafter or "ngram", c.num_draft_tokens + 1) for c in plan.choices)
    )


BROKEN: dict[str, tuple[str, Callable[..., object], str]] = {
    "plans nothing": ("plan", answers_nothing, "plan does not fit .*NoneType"),
    "plans by list": ("plan", as_list, "plan does not fit .*tuple of Choice"),
    "plans parts of tokens": ("plan", in_parts, "plan raised PlanError: .*1.5"),
    "plans with an error": ("plan", fails, "plan raised ValueError: boom"),
    "changes its belief": ("plan", halves, "plan changed the Belief"),
    "refines to nothing": ("refine", answers_nothing, "refine does not shorten .*NoneType"),
    "refines a request away": ("refine", drops_a_request, "refine does not shorten .* choices for"),
    "refines to parts of tokens": ("refine", in_parts, "refine raised PlanError: .*1.5"),
    "refines to more": ("refine", lengthens, "refine does not shorten"),
    "refines with an error": ("refine", fails, "refine raised ValueError: boom"),
    "learns with an error": ("update", fails, "update raised ValueError: boom"),
    "changes what it was told": ("update", forgets, "update changed the Observation"),
    "clones with an error": ("clone", fails, "clone raised ValueError: boom"),
    "clones to nothing": ("clone", answers_nothing, "clone.. returned another type"),
}


@pytest.mark.parametrize(("method", "act", "says"), BROKEN.values(), ids=BROKEN.keys())
def test_the_checks_name_the_rule_that_is_broken(
    method: str, act: Callable[..., object], says: str
) -> None:
    check_policy(Plain())
    with pytest.raises(AssertionError, match=says):
        check_policy(type("Broken", (Plain,), {method: act})())


def by_belief(self: Policy, view: BatchView, belief: Belief) -> Plan:
    drafts = sum(float(rows.sum()) for rows in belief.survival.values())
    return Plan.uniform(view, "ngram", min(int(drafts), 2))


def looks_at_all(self: Policy, view: BatchView, plan: Plan, known: Confidence, _: Belief) -> Plan:
    for row, choice in zip(known, plan.choices, strict=True):
        assert all(row[i] <= 1.0 for i in range(choice.num_draft_tokens))
    return plan


def learns_confidence(self: Policy, observation: Observation) -> None:
    assert len(observation.confidence) == len(observation.view.requests)  # type: ignore[arg-type]


def expects_its_plan(self: Policy, observation: Observation) -> None:
    for request, choice in zip(observation.view.requests, observation.plan.choices, strict=True):
        hint = request.hints.get("ngram")
        may = "ngram" in request.drafters and request.remaining_tokens > 1
        if may and hint is None and observation.view.free_kv_tokens > 99:
            {"ngram": 2}[choice.drafter]  # type: ignore[index]


def by_the_first(self: Policy, view: BatchView, belief: Belief) -> Plan:
    context = sum(request.context_tokens for request in view.requests)
    return Plan.uniform(view, "ngram", 1 + vars(self).setdefault("first", context) % 5)


def every_second(self: Policy, view: BatchView, plan: Plan, *_: object) -> Plan:
    vars(self)["asked"] = vars(self).get("asked", 0) + 1
    return plan if vars(self)["asked"] % 2 else Plan.off(view)


UNTRUE: dict[str, tuple[dict[str, object], str]] = {
    "drafts though it says never": ({"drafts": False}, "has drafts = False"),
    "reads a belief unsaid": ({"plan": by_belief, "uses_belief": False}, "uses_belief = False"),
    "keeps the first view": ({"plan": by_the_first}, "planning changed the policy's state"),
    "refines by turns": ({"refine": every_second}, "refining changed the policy's state"),
    "refines only what is known": ({"refine": looks_at_all}, "refine raised IndexError"),
    "learns only of the confident": ({"update": learns_confidence}, "update raised TypeError"),
    "learns only of its plans": ({"update": expects_its_plan}, "update raised KeyError: None"),
}


@pytest.mark.parametrize(("members", "says"), UNTRUE.values(), ids=UNTRUE.keys())
def test_the_checks_find_what_an_engine_would(members: dict[str, object], says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        check_policy(type("Untrue", (Plain,), members)())


class Locked(Plain):
    """What it has cannot be copied; it knows how to make another."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def clone(self) -> "Locked":
        return Locked()


def test_the_checks_copy_a_policy_by_its_own_clone() -> None:
    check_policy(Locked())


class Sharing(Plain):
    """Its clones count on with it, from 0 to 3."""

    def __init__(self, updates: list[int] | None = None) -> None:
        self.updates = [] if updates is None else updates

    def plan(self, view: BatchView, belief: Belief) -> Plan:
        return Plan.uniform(view, "ngram", len(self.updates) % 4)

    def update(self, observation: Observation) -> None:
        self.updates.append(1)

    def clone(self) -> "Sharing":
        return Sharing(self.updates)


def test_the_checks_find_what_a_clone_shares() -> None:
    with pytest.raises(AssertionError, match="updating a clone changed its original"):
        check_policy(Sharing())


def test_roofline_drafts_when_memory_bound_and_not_when_compute_bound() -> None:
    roofline = policies.build("roofline")
    requests = [
        RequestView(
            str(i), context_tokens=100, generated_tokens=1, remaining_tokens=50, drafters=("ngram",)
        )
        for i in range(64)
    ]
    few = BatchView(0, tuple(requests[:2]), free_kv_tokens=1000)
    many = BatchView(0, tuple(requests), free_kv_tokens=1000)
    belief = Belief({"ngram": np.full((64, 4), 0.5)}, ToyCost())
    assert all(choice.num_draft_tokens >= 4 for choice in roofline.plan(few, belief).choices)
    assert roofline.plan(many, belief).is_off


def test_oracle_drafts_exactly_what_will_be_accepted_where_that_pays() -> None:
    oracle = policies.build({"kind": "oracle", "foresight": Foreseen()})
    generator = np.random.default_rng(3)
    drafts = 0
    for step in range(40):
        view = random_view(generator, step)
        plan = oracle.plan(view, random_belief(generator, view))
        for request, choice in zip(view.requests, plan.choices, strict=True):
            if choice.drafter is not None:
                drafts += 1
                known = Foreseen().accepted_tokens(
                    request.id, request.generated_tokens, choice.drafter
                )
                assert choice.num_draft_tokens <= known
    assert drafts > 20
