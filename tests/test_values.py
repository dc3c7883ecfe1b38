"""Facts about the vocabulary: its values can be copied and kept, and refuse what they cannot be."""

import copy
import json
import math
import pickle
import sys
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch

from sdcontrol import policies
from sdcontrol.answers import check_shorter
from sdcontrol.controller import Controller
from sdcontrol.core import BatchView, Belief, Choice, Hint, Observation, Plan, RequestView, Timing
from sdcontrol.errors import ConfigError, ObservationError, PlanError
from sdcontrol.policies.base import Policy

WHOLE_COPIES = [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))]  # noqa: S301  (ours)
COPY_NAMES = ["deepcopy", "pickle"]


def view_of(step: int = 0, batch: int = 2, free: int = 1000) -> BatchView:
    """Nothing is said of the requests but what must be."""
    return BatchView(
        step,
        tuple(
            RequestView(f"r{row}", 100 + step, step, 500, drafters=("ngram",))
            for row in range(batch)
        ),
        free,
    )


def told(view: BatchView, plan: Plan, accepted: int = 1) -> Observation:
    lengths = tuple(choice.num_draft_tokens for choice in plan.choices)
    counts = tuple(min(accepted, length) for length in lengths)
    emitted = tuple(count + 1 for count in counts)
    return Observation(view, plan, lengths, lengths, counts, emitted, Timing({}, 0.01))


class Uniform(Policy):
    """The same plan always; remembers what it was told last."""

    def __init__(self) -> None:
        self.last: Observation | None = None

    def plan(self, view: BatchView, belief: Belief) -> Plan:
        return Plan.uniform(view, "ngram", 2)

    def update(self, observation: Observation) -> None:
        self.last = observation


# Copies


@pytest.mark.parametrize("copied", WHOLE_COPIES, ids=COPY_NAMES)
def test_values_are_copied_whole_where_nobody_gave_hints(copied: Any) -> None:
    view = view_of()
    observation = told(view, Plan.uniform(view, "ngram", 2))
    assert copied(observation) == observation
    assert copied(view) == view
    assert asdict(view)["requests"][0]["hints"] == {}


@pytest.mark.parametrize("copied", WHOLE_COPIES, ids=COPY_NAMES)
def test_copies_of_choices_are_interned(copied: Any) -> None:
    assert copied(Choice.of("ngram", 3)) is Choice.of("ngram", 3)
    assert copied(Choice.off()) is Choice.off()


@pytest.mark.parametrize("copied", WHOLE_COPIES, ids=COPY_NAMES)
def test_a_copy_of_a_controller_goes_on_as_its_original_does(copied: Any) -> None:
    controller = Controller("goodput", clock=None)

    def plans(one: Controller, steps: range) -> list[Plan]:
        made = []
        for step in steps:
            view = view_of(step)
            made.append(one.plan(view))
            one.observe(told(view, made[-1], accepted=step % 4))
        return made

    plans(controller, range(40))
    other = copied(controller)
    assert plans(other, range(40, 80)) == plans(controller, range(40, 80))


def test_a_policy_that_remembers_an_observation_can_be_cloned() -> None:
    policy, view = Uniform(), view_of()
    policy.update(told(view, Plan.off(view)))
    assert policy.clone().last == policy.last
    goodput = policies.build("goodput")
    goodput.update(told(view, Plan.off(view)))
    assert isinstance(goodput.clone(), type(goodput))


# Choices and plans


@pytest.mark.parametrize("tokens", [2.5, 2.0, math.nan, True, "2", None, np.float64(2)], ids=repr)
def test_draft_tokens_are_counted(tokens: Any) -> None:
    for make in (Choice, Choice.of):
        with pytest.raises(PlanError, match="give a whole number"):
            make("ngram", tokens)


def test_a_whole_number_of_another_kind_becomes_an_int_for_everybody() -> None:
    for make in (Choice.of, Choice):
        choice = make("of another kind", np.int64(3))
        assert type(choice.num_draft_tokens) is int
        assert json.dumps(choice.num_draft_tokens) == "3"
    with pytest.raises(PlanError):
        Choice.of("of another kind", 4.0)  # type: ignore[arg-type]
    assert type(Choice.of("of another kind", 4).num_draft_tokens) is int


class Alike:
    """Like a choice, as far as names go."""

    drafter, num_draft_tokens = "ngram", 3


@pytest.mark.parametrize(
    "choices",
    [[Choice.of("ngram", 2)] * 2, (Alike(),) * 2, (None,) * 2, iter(())],
    ids=lambda wrong: type(wrong).__name__,
)
def test_a_plan_holds_a_tuple_of_choices(choices: Any) -> None:
    view = view_of()
    with pytest.raises(PlanError, match="give a tuple of Choice"):
        Plan(choices).check(view)


@pytest.mark.parametrize(
    "choices",
    [[Choice.of("ngram", 1)] * 2, (Alike(),) * 2],
    ids=lambda wrong: type(wrong).__name__,
)
def test_a_refined_plan_holds_a_tuple_of_choices_too(choices: Any) -> None:
    with pytest.raises(PlanError, match="give a tuple of Choice"):
        check_shorter(Plan(choices), Plan.uniform(view_of(), "ngram", 3))


def test_without_free_slots_nobody_drafts_and_that_is_no_fault() -> None:
    controller = Controller("goodput", clock=None)
    for step in range(5):
        view = view_of(step, free=-1)
        plan = controller.plan(view)
        assert plan.is_off
        assert controller.take_faults() == ()
        controller.observe(told(view, plan))
    with pytest.raises(PlanError, match="-1 KV slots are free"):
        Plan.uniform(view_of(), "ngram", 1).check(view_of(free=-1))


# Views


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"id": 7}, "id of request 7: 7; give a string"),
        ({"drafters": "ngram"}, "'ngram'; give a tuple of names"),
        ({"drafters": None}, "None; give a tuple of names"),
        ({"hints": None}, "None; give a mapping"),
        ({"hints": {"ngram": None}}, "each is a Hint"),
        ({"hints": {"ngram": 3}}, "each is a Hint"),
        ({"context_tokens": None}, "context_tokens of request 'mine' is None; give a whole number"),
        ({"context_tokens": "10"}, "context_tokens of request 'mine' is '10'"),
        ({"generated_tokens": 1.5}, "generated_tokens of request 'mine' is 1.5"),
        ({"remaining_tokens": math.nan}, "remaining_tokens of request 'mine' is nan"),
        ({"remaining_tokens": 10**30}, r"give less than 2\*\*62"),
        (
            {"remaining_tokens": sys.maxsize},
            r"give less than 2\*\*62",
        ),  # less than none as an array of ints
    ],
    ids=repr,
)
def test_a_request_is_refused_where_it_is_made(facts: dict[str, Any], says: str) -> None:
    right = {"id": "mine", "context_tokens": 10, "generated_tokens": 1, "remaining_tokens": 10}
    with pytest.raises(ConfigError, match=says):
        RequestView(**{**right, **facts})


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"step": 10**30}, r"step is 1000.*; give less than 2\*\*63"),
        ({"step": None}, "step is None; give a whole number"),
        ({"free_kv_tokens": math.inf}, "free_kv_tokens is inf; give a whole number"),
        ({"prefill_tokens": "3"}, "prefill_tokens is '3'"),
        ({"requests": None}, "requests of step 0: None; give a tuple of RequestView"),
        ({"requests": ("r0",)}, "give a tuple of RequestView"),
    ],
    ids=repr,
)
def test_a_view_is_refused_where_it_is_made(facts: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        BatchView(**{"step": 0, "requests": (), "free_kv_tokens": 10, **facts})


def test_whole_numbers_of_other_types_and_lists_of_requests_are_taken() -> None:
    """As arrays and tensors have them; what is kept are ints and a tuple."""
    request = RequestView("mine", np.int64(10), np.int32(1), torch.tensor(10))  # type: ignore[arg-type]
    view = BatchView(np.int64(3), [request], sys.maxsize)  # type: ignore[arg-type]
    assert view == BatchView(3, (RequestView("mine", 10, 1, 10),), sys.maxsize)
    counts = request.context_tokens, request.generated_tokens, request.remaining_tokens, view.step
    assert {*map(type, counts)} == {int}
    assert Controller("goodput", clock=None).plan(view).is_off


def test_a_hint_that_counts_nothing_says_zero() -> None:
    with pytest.raises(ConfigError, match=r"catch_up_tokens.*0"):
        Hint(catch_up_tokens=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [math.inf, math.nan, 2.5, "8", sys.maxsize, 10**30], ids=repr)
@pytest.mark.parametrize("name", ["max_draft_tokens", "match_tokens", "catch_up_tokens"])
def test_a_hint_counts_or_says_nothing(name: str, count: Any) -> None:
    """As an array of ints infinity is less than none, and nobody would draft."""
    with pytest.raises(ConfigError, match=f"^{name} of .*; give a whole number below"):
        Hint(**{name: count})
    hint = Hint(**{name: np.int64(8)})
    assert hint == Hint(**{name: 8})
    assert type(getattr(hint, name)) is int


def test_a_look_up_that_says_how_far_it_could_go_is_drafted_with() -> None:
    hints = {"ngram": Hint(2**62 - 1 - 9, 9)}
    request = RequestView("mine", 10, 1, 2**62 - 1 - 11, drafters=("ngram",), hints=hints)
    plan = Controller("goodput", clock=None).plan(BatchView(0, (request,), sys.maxsize))
    assert plan.choices[0].num_draft_tokens > 4


def test_a_list_of_drafters_is_taken_as_a_tuple() -> None:
    request = RequestView("mine", 10, 1, 10, drafters=["ngram"])  # type: ignore[arg-type]
    assert request.drafters == ("ngram",)


# Observations


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "more accepted than proposed": ({"accepted": (3, 0)}, "'r0': 3 tokens accepted of 2"),
    "more proposed than drafted": ({"drafted": (2, 1)}, "'r1': 0 tokens accepted of 2 .* and 1"),
    "fewer than none": ({"accepted": (0, -1)}, "accepted of request 'r1' is -1"),
    "fewer than none emitted": ({"emitted": (-1, 2)}, "emitted of request 'r0' is -1"),
    "parts of tokens": ({"accepted": (1.5, 0)}, "accepted of request 'r0' is 1.5"),
    "no number": ({"accepted": (None, 0)}, "accepted of request 'r0' is None"),
    "an array": ({"accepted": np.array([0, 0])}, "accepted is of type ndarray.*tolist"),
    "no plan": ({"plan": None}, "give one entry per request"),
    "no view": ({"view": None}, "give one entry per request"),
    "no column": ({"emitted": None}, "give one entry per request"),
    "too few": ({"emitted": (1,)}, "1 entries in emitted for 2 requests"),
    "no seconds": ({"timing": Timing(None)}, "give floats"),  # type: ignore[arg-type]
    "no seconds of verification": ({"timing": Timing({}, None)}, "give floats"),  # type: ignore[arg-type]
    "too little confidence": ({"confidence": ((0.5,), ())}, "'r0': confidence in 1 tokens of 2"),
    "confidence of one": ({"confidence": ((0.5, 0.5),)}, "1 entries in confidence for 2"),
    "confidence in words": ({"confidence": (("high", "low"), ())}, "confidence .* give floats"),
    "more than can be counted": ({"emitted": (10**20, 1)}, "emitted of request 'r0' is 1000"),
    "a shadow beyond count": (
        {"shadow": {"ngram": (None, 10**20)}},
        "shadow of 'ngram' .* is 1000",
    ),
    "no confidence": ({"confidence": (None, ())}, r"confidence \(None, \(\)\)"),
    "a node too few": ({"accepted_nodes": ((), ())}, "'r0': accepted_nodes"),
    "a node not proposed": ({"accepted_nodes": ((2,), ())}, "'r0': accepted_nodes .* than 2"),
    "nodes of one": ({"accepted_nodes": ((0,),)}, "1 entries in accepted_nodes"),
    "a shadow of nothing": ({"shadow": {"ngram": (-3, None)}}, "shadow of 'ngram' .* is -3"),
    "a shadow of one": ({"shadow": {"ngram": (1,)}}, "1 entries in ngram for 2"),
    "no shadow": ({"shadow": {"ngram": None}}, "give one entry per request"),
}


@pytest.mark.parametrize(("facts", "says"), WRONG.values(), ids=WRONG.keys())
def test_what_cannot_have_come_of_a_step_is_refused(facts: dict[str, Any], says: str) -> None:
    """And nothing was learnt of it: the step can be told again."""
    controller = Controller("goodput", clock=None)
    view = view_of()
    right = replace(told(view, Plan.uniform(view, "ngram", 2)), accepted=(1, 0), emitted=(2, 1))
    with pytest.raises(ObservationError, match=says):
        controller.observe(replace(right, **facts))
    assert controller.num_observed == 0
    controller.observe(right)
    assert controller.num_observed == 1


@pytest.mark.parametrize(
    "facts",
    [
        {"confidence": ((0.5, math.nan), ())},
        {"accepted_nodes": ((1,), ())},
        {"shadow": {"ngram": (None, 3)}},
        {"accepted": [1, 0]},
        {"accepted": (np.int64(1), 0)},
        {"timing": Timing({"ngram": math.nan}, math.inf)},
        {"proposed": (1, 0)},
    ],
    ids=repr,
)
def test_what_can_have_come_of_a_step_is_taken(facts: dict[str, Any]) -> None:
    controller = Controller("goodput", clock=None)
    view = view_of()
    right = replace(told(view, Plan.uniform(view, "ngram", 2)), accepted=(1, 0), emitted=(2, 1))
    controller.observe(replace(right, **facts))
    assert not controller.plan(view_of(1)).is_off
    assert controller.take_faults() == ()
