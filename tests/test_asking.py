"""What costs and beliefs of anybody's making may answer, and what they are told where they may not."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sdcontrol import policies
from sdcontrol.core import BatchView, Belief, Plan, RequestView
from sdcontrol.errors import PlanError
from sdcontrol.policies.reading import layout_of
from sdcontrol.policies.rivals.budget_argmax import BudgetArgmax

ARMS = ("ngram", "draft_model")
ASKERS = ("goodput", "roofline", "budget_argmax", "smartspec")
SURVIVAL = {
    "ngram": np.cumprod(np.full((3, 4), 0.6), axis=1),
    "draft_model": np.cumprod(np.full((3, 4), 0.8), axis=1),
}


class Own:
    """A cost whose verification is as told; the draft model takes a millisecond a round."""

    def __init__(self, verify: Callable[[Any], Any], round_seconds: Any = 1e-3) -> None:
        self.verify, self.round_seconds = verify, round_seconds

    def verify_seconds(self, num_tokens: Any, kv_tokens: Any, num_requests: int) -> Any:
        return self.verify(num_tokens)

    def draft_seconds(self, family: str, num_requests: Any, kv_tokens: Any) -> Any:
        return 0.0 if family == "ngram" else self.round_seconds

    def overhead_seconds(self) -> float:
        return 1e-4


def view_of() -> BatchView:
    requests = tuple(RequestView(f"r{row}", 100, 5, 50, drafters=ARMS) for row in range(3))
    return BatchView(0, requests, 1000)


def planned(name: str, cost: Own, survival: Any = None) -> Plan:
    """The plan, refined where the policy refines."""
    policy, view = policies.build(name), view_of()
    belief = Belief(SURVIVAL if survival is None else survival, cost)
    if isinstance(policy, BudgetArgmax):
        policy._num_steps = 1000  # before it has seen enough it asks nobody
    plan = policy.plan(view, belief)
    if isinstance(policy, policies.Refiner) and not plan.is_off:
        drafted = tuple((0.9,) * choice.num_draft_tokens for choice in plan.choices)
        return policy.refine(view, plan, drafted, belief)
    return plan


@pytest.mark.parametrize("name", ASKERS)
def test_a_cost_may_answer_one_number_for_all_or_a_list(name: str) -> None:
    for simple, written_out in (
        (lambda tokens: 0.01, lambda tokens: np.full(np.shape(tokens), 0.01)),
        (lambda tokens: (0.01 + 1e-5 * tokens).tolist(), lambda tokens: 0.01 + 1e-5 * tokens),
    ):
        assert planned(name, Own(simple)) == planned(name, Own(written_out))


@pytest.mark.parametrize("name", ASKERS)
@pytest.mark.parametrize(
    "verify",
    [lambda tokens: max(0.01, 1e-4 * tokens), lambda tokens: [0.01, 0.02], str],
    ids=range(3),
)
def test_a_cost_that_takes_no_arrays_is_told_so(name: str, verify: Callable[[Any], Any]) -> None:
    with pytest.raises(
        PlanError, match=r"verify_seconds of Own, asked for an array of \d+: .*np.max"
    ):
        planned(name, Own(verify))


def test_what_a_cost_answers_stays_its_own() -> None:
    answers = []

    def verify(tokens: Any) -> Any:
        answers.append(0.01 + 1e-5 * np.asarray(tokens))
        answers.append(answers[-1].copy())
        return answers[-2]

    for name in ASKERS:
        planned(name, Own(verify))
    assert all(np.array_equal(*pair) for pair in zip(answers[::2], answers[1::2], strict=True))


@pytest.mark.parametrize("seconds", [np.nan, np.inf, -0.01])
@pytest.mark.parametrize("name", ["goodput", "roofline"])
def test_steps_take_finite_numbers_of_seconds(name: str, seconds: float) -> None:
    with pytest.raises(PlanError, match="finite numbers only"):
        planned(name, Own(lambda tokens: seconds))


@pytest.mark.parametrize(
    ("name", "seconds"),
    [("goodput", np.nan), ("goodput", np.inf), ("roofline", np.nan), ("roofline", -0.01)],
)
def test_rounds_take_finite_numbers_of_seconds(name: str, seconds: float) -> None:
    with pytest.raises(PlanError, match="finite numbers only"):
        planned(name, Own(lambda tokens: 0.01, round_seconds=seconds))


@pytest.mark.parametrize("name", ["goodput", "heuristic", "oracle"])
@pytest.mark.parametrize("rows", [np.ones((2, 4)), np.ones((6, 4)), np.ones(4)], ids=np.shape)
def test_survival_has_a_row_per_request(name: str, rows: Any) -> None:
    survival = {"ngram": rows, "draft_model": rows}
    spec: Any = {"kind": "oracle", "foresight": Foreseen()} if name == "oracle" else name
    with pytest.raises(PlanError, match=r"survival of .* for 3 requests; give \[requests, K\]"):
        planned(spec, Own(lambda tokens: 0.01), survival)


class Foreseen:
    def accepted_tokens(self, request_id: str, generated_tokens: int, drafter: str) -> int:
        return 3


def test_survival_may_be_lists() -> None:
    lists = {arm: rows.tolist() for arm, rows in SURVIVAL.items()}
    for name in ("goodput", "heuristic"):
        cost = Own(lambda tokens: 0.01)
        assert planned(name, cost, lists) == planned(name, cost)


def test_ever_new_menus_do_not_fill_the_memory() -> None:
    most = layout_of.cache_info().maxsize
    assert most is not None
    for n in range(most + 10):
        layout_of((f"menu {n}",), (f"menu {n}",))
    assert layout_of.cache_info().currsize == most
