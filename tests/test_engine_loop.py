"""The engine's loop: bad planners, threads, refusals, and that not drafting costs nothing."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from sdcontrol.core import (
    BatchView,
    Choice,
    Confidence,
    Hint,
    Observation,
    Plan,
    RequestView,
    Timing,
)
from sdcontrol.engine.config import EngineConfig
from sdcontrol.engine.drafters.base import Draft, DraftTask, KeepDrafting
from sdcontrol.engine.drafters.build import DrafterSpec
from sdcontrol.engine.drafters.ngram import NgramDrafter
from sdcontrol.engine.history import RequestHistory, RequestLog
from sdcontrol.engine.kernels.reference import TorchAttention
from sdcontrol.engine.kv_cache import KVCache
from sdcontrol.engine.loop import Engine
from sdcontrol.engine.runner import ModelRunner
from sdcontrol.engine.stats import EngineStats, Tally
from sdcontrol.errors import (
    ConfigError,
    ObservationError,
    RequestRefused,
    SdcontrolError,
    UnsupportedGeneration,
)
from sdcontrol.observed_refusals import check_observation
from tests.engine_support import (
    VOCAB,
    ForcedPlanner,
    RandomPlanner,
    RecordingPlanner,
    Reference,
    generate_alone,
    live_requests,
    noised,
    random_prompt,
    run_checked,
    submit_all,
    text_tokenizer,
    tiny_model,
)

NEW_TOKENS = 14
RECENT, SCORED = "sparse_kv:32", "sparse_kv:40:scored"
SMALL = EngineConfig(block_size=8, max_batch_size=4, max_prefill_tokens=64, kv_tokens=512)
PROMPTS = tuple(random_prompt(length, seed=length) for length in (6, 21, 36, 50, 44, 12))


@cache
def target() -> PreTrainedModel:
    return tiny_model("Llama", seed=41)


@cache
def draft_model() -> PreTrainedModel:
    return noised(target())


@cache
def references() -> tuple[Reference, ...]:
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    return tuple(generate_alone(target(), prompt, **options) for prompt in PROMPTS)


def check_all(engine: Engine) -> None:
    """All prompts, decoded now, are as `generate` says."""
    ids = submit_all(engine, PROMPTS, max_new_tokens=NEW_TOKENS)
    finished = run_checked(engine)
    outputs = [finished[request_id].output for request_id in ids]
    assert outputs == [reference.tokens for reference in references()]


# ---- off is free


Call = tuple[object, ...]


def record_calls(patch: pytest.MonkeyPatch) -> list[Call]:
    """From now on: forwards, cache writes, moves and attention, with the shapes of their tensors."""
    calls: list[Call] = []

    def listen(owner: type, name: str) -> None:
        plain = getattr(owner, name)

        def listening(self: object, *arguments: object, **keywords: object) -> object:
            shapes = [tuple(a.shape) for a in arguments if isinstance(a, Tensor)]
            calls.append((owner.__name__, name, shapes))
            return plain(self, *arguments, **keywords)

        patch.setattr(owner, name, listening)

    for owner, names in (
        (KVCache, ("write", "gather", "span", "move")),
        (TorchAttention, ("attend",)),
        (ModelRunner, ("forward", "move")),
    ):
        for name in names:
            listen(owner, name)
    return calls


class OpNames(TorchDispatchMode):
    """Every torch operation that is carried out."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self,
        function: Callable[..., object],
        types: object,
        args: tuple = (),
        kwargs: object = None,
    ) -> object:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def calls_of(drafters: Sequence[DrafterSpec], planner: RecordingPlanner | None) -> list[Call]:
    engine = Engine(target(), drafters=drafters, planner=planner, config=SMALL)
    with engine, pytest.MonkeyPatch.context() as patch:
        calls = record_calls(patch)
        check_all(engine)
    return calls


def ops_of(drafters: Sequence[DrafterSpec], planner: RecordingPlanner | None) -> list[str]:
    references()  # made before, not among what is counted
    engine = Engine(target(), drafters=drafters, planner=planner, config=SMALL)
    with engine, OpNames() as ops:
        check_all(engine)
    return ops.names


def test_steps_without_drafts_make_the_calls_of_an_engine_without_drafters() -> None:
    plain = calls_of([], None)
    assert len(plain) > 100
    assert calls_of(["ngram", RECENT, draft_model()], RecordingPlanner()) == plain


def test_steps_without_drafts_make_the_same_torch_operations() -> None:
    plain = ops_of([], None)
    assert len(plain) > 1000
    assert ops_of(["ngram", RECENT, draft_model()], RecordingPlanner()) == plain


def test_drafting_does_make_other_calls() -> None:
    """Or the two tests above would compare nothing."""
    planner = ForcedPlanner(arm="draft_model", num_draft_tokens=2)
    assert calls_of([draft_model()], planner) != calls_of([], None)


# ---- bad planners


class BadPlanner(RecordingPlanner):
    """Drafts with one arm, and does something wrong at every third step."""

    def __init__(self, *, arm: str = "ngram", **crimes: Callable[..., object]) -> None:
        super().__init__()
        self._arm = arm
        self._crimes = crimes

    def plan(self, view: BatchView) -> Plan:
        if "plan" in self._crimes and view.step % 3 == 2:
            return self._crimes["plan"](view)
        return Plan.uniform(view, self._arm, 3)

    def refine(self, view: BatchView, plan: Plan, confidence: Confidence) -> Plan:
        if "refine" in self._crimes and view.step % 3 == 2:
            return self._crimes["refine"](view, plan)
        return plan

    def observe(self, observation: Observation) -> None:
        super().observe(observation)
        if "observe" in self._crimes and observation.view.step % 3 == 2:
            self._crimes["observe"](observation)


def fail(*_: object) -> object:
    raise KeyError("a bug of the planner's")


def greedy_for_slots(view: BatchView) -> Plan:
    """More than the cache can hold."""
    return Plan(tuple(Choice.of("ngram", 10_000) for _ in view.requests))


BAD_PLANS: dict[str, Callable[..., object]] = {
    "raises": fail,
    "no plan": lambda view: None,
    "a choice too many": lambda view: Plan((*Plan.off(view).choices, Choice.off())),
    "nobody": lambda view: Plan(()) if view.requests else fail(),
    "an unknown drafter": lambda view: Plan(tuple(Choice.of("eagle", 1) for _ in view.requests)),
    "too many tokens": greedy_for_slots,
    "choices of another type": lambda view: Plan(tuple("ngram" for _ in view.requests)),
}


@pytest.mark.parametrize("crime", BAD_PLANS)
def test_a_bad_plan_costs_one_plain_step_and_no_text(crime: str) -> None:
    planner = BadPlanner(plan=BAD_PLANS[crime])
    engine = Engine(target(), drafters=["ngram"], planner=planner, config=SMALL)
    with engine, capture_logs() as logs:
        check_all(engine)
    assert engine.drafting.quarantined == {}
    struck = [o for o in planner.observations if o.faults]
    assert len(struck) >= 3
    assert all(o.plan.is_off and not any(o.proposed) for o in struck)
    assert all(fault.startswith("planner failed to plan") for fault in planner.faults())
    told = [log["times"] for log in logs if log["event"] == "planner_failed"]
    assert told == [1 << n for n in range(len(struck).bit_length())]  # not one line per step
    assert any(o.proposed and any(o.proposed) for o in planner.observations)


BAD_REFINEMENTS: dict[str, Callable[..., object]] = {
    "raises": fail,
    "no plan": lambda view, plan: None,
    "for nobody": lambda view, plan: Plan(()),
    "another drafter": lambda view, plan: Plan(tuple(Choice.of("eagle", 1) for _ in plan.choices)),
}


@pytest.mark.parametrize("crime", BAD_REFINEMENTS)
def test_a_bad_refinement_leaves_the_plan_and_blames_no_drafter(crime: str) -> None:
    planner = BadPlanner(arm="draft_model", refine=BAD_REFINEMENTS[crime])
    drafters = ["ngram", draft_model()]
    with Engine(target(), drafters=drafters, planner=planner, config=SMALL) as engine:
        check_all(engine)
        assert engine.drafting.quarantined == {}
    struck = [o for o in planner.observations if o.faults]
    assert struck
    assert any(any(o.proposed) for o in struck)
    assert all(fault.startswith("planner failed to refine") for fault in planner.faults())


def test_a_refinement_cannot_lengthen_a_plan() -> None:
    def longer(view: BatchView, plan: Plan) -> Plan:
        return Plan.uniform(view, "draft_model", 9)

    planner = BadPlanner(arm="draft_model", refine=longer)
    with Engine(target(), drafters=[draft_model()], planner=planner, config=SMALL) as engine:
        check_all(engine)
    assert max(max(o.proposed, default=0) for o in planner.observations) == 3
    assert planner.faults() == []


class Silent(NgramDrafter):
    """Does not say how sure it is."""

    def propose(self, tasks: Sequence[DraftTask], keep_drafting: KeepDrafting) -> Sequence[Draft]:
        return [draft._replace(confidence=()) for draft in super().propose(tasks, keep_drafting)]


@pytest.mark.parametrize("drafter", [NgramDrafter, Silent])
@pytest.mark.parametrize("asked", [True, False])
def test_n_gram_drafts_are_refined_unless_a_planner_says_that_hints_were_enough(
    asked: bool, drafter: type[NgramDrafter]
) -> None:
    class Cutting(ForcedPlanner):
        refines_hinted = asked

        def refine(self, view: BatchView, plan: Plan, confidence: Confidence) -> Plan:
            assert len(confidence) == len(view.requests)
            return Plan.uniform(view, self.arm, 1)

    planner = Cutting(num_draft_tokens=3)
    with Engine(target(), drafters=[drafter()], planner=planner, config=SMALL) as engine:
        check_all(engine)
    drafted = max(max(o.drafted, default=0) for o in planner.observations)
    proposed = max(max(o.proposed, default=0) for o in planner.observations)
    assert (drafted, proposed) == (3, 1 if asked else 3)
    assert planner.faults() == []


def test_a_planner_that_fails_to_observe_stops_nothing() -> None:
    planner = BadPlanner(observe=fail)
    with Engine(target(), drafters=["ngram"], planner=planner, config=SMALL) as engine:
        check_all(engine)
    assert planner.faults()
    assert all(fault.startswith("planner failed to observe") for fault in planner.faults())


# ---- threads


class Visitor(threading.Thread):
    """Submits requests one after the other, and cancels every third."""

    def __init__(self, engine: Engine, number: int) -> None:
        super().__init__()
        self._engine = engine
        self._number = number
        self.taken: dict[str, int] = {}  # index of the prompt by name
        self.cancelled: set[str] = set()
        self.has_finished = False

    def run(self) -> None:
        for turn in range(8):
            index, name = (self._number + turn) % len(PROMPTS), f"{self._number}.{turn}"
            options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
            self._engine.submit(PROMPTS[index], request_id=name, **options)
            self.taken[name] = index
            if turn % 3 == 2 and self._engine.cancel(name):
                self.cancelled.add(name)
        self.has_finished = True


def test_other_threads_submit_and_cancel_while_one_steps() -> None:
    """Every text is whole, or the beginning of what it would have been."""
    planner = RandomPlanner(seed=5)
    drafters = ["ngram", RECENT, SCORED, draft_model()]
    finished = {}
    with Engine(target(), drafters=drafters, planner=planner, config=SMALL) as engine:
        visitors = [Visitor(engine, number) for number in range(4)]
        for visitor in visitors:
            visitor.start()
        while any(visitor.is_alive() for visitor in visitors) or engine.has_work:
            finished |= engine.run()
        engine.scheduler.check_integrity()
    assert all(visitor.has_finished for visitor in visitors)
    taken = {name: index for visitor in visitors for name, index in visitor.taken.items()}
    cancelled = set().union(*(visitor.cancelled for visitor in visitors))
    assert finished.keys() == taken.keys()
    for name, request in finished.items():
        reference = references()[taken[name]].tokens
        was_cut = request.finish_reason == "cancelled"
        assert name in cancelled or not was_cut
        assert request.output == (reference[: len(request.output)] if was_cut else reference)
    assert planner.faults() == []


class EngineWithVisitor(Engine):
    """Somebody submits a request just before each of the first steps."""

    visitors = 3

    def step(self) -> Observation:
        if self.visitors:
            self.visitors -= 1
            self.submit([5, 6, 7], max_new_tokens=1, do_sample=False)
        return super().step()


def test_run_returns_requests_that_came_and_ended_within_one_step() -> None:
    with EngineWithVisitor(target(), config=SMALL) as engine:
        engine.submit(PROMPTS[0], max_new_tokens=6, do_sample=False)
        assert sorted(engine.run()) == [f"request-{number}" for number in range(4)]


def test_a_late_cancel_does_not_hit_a_new_request_of_the_same_name() -> None:
    class CancelsInTheLastStep(RecordingPlanner):
        def observe(self, observation: Observation) -> None:
            super().observe(observation)

        def plan(self, view: BatchView) -> Plan:
            if view.requests and view.requests[0].remaining_tokens == 1:
                assert engine.cancel("again")
            return Plan.off(view)

    with Engine(target(), planner=CancelsInTheLastStep(), config=SMALL) as engine:
        options = {"do_sample": False, "request_id": "again"}
        engine.submit(PROMPTS[1], max_new_tokens=3, **options)
        first = engine.run()["again"]
        engine.submit(PROMPTS[1], max_new_tokens=2, **options)
        engine.step()
        second = live_requests(engine)["again"]
        engine.run()
    assert (first.finish_reason, first.output) == ("length", references()[1].tokens[:3])
    assert second.output[:1] == references()[1].tokens[:1]


# ---- submission


REFUSALS: dict[str, tuple[Any, dict[str, object], str]] = {
    "too long": ([1] * 500, {"max_new_tokens": 13}, "KV cache holds 512"),
    "empty": ([], {"max_new_tokens": 3}, "empty prompt"),
    "token too large": ([1, VOCAB], {"max_new_tokens": 3}, f"token {VOCAB} is outside"),
    "token negative": ([1, -1], {"max_new_tokens": 3}, "token -1 is outside"),
    "taken": ([1, 2], {"max_new_tokens": 3, "request_id": "request-0"}, "is taken"),
    "number as its id": (
        [1, 2],
        {"max_new_tokens": 3, "request_id": 7},
        "request id 7; give a string",
    ),
    "halves of tokens": ([1.5, 2], {"max_new_tokens": 3}, "give a text, or a list of token ids"),
    "a batch": (
        torch.tensor([[1, 2]]),
        {"max_new_tokens": 3},
        "give a text, or a list of token ids",
    ),
    "a token": (5, {"max_new_tokens": 3}, "prompt 5: .*; give a text, or a list of token ids"),
    "nothing to do": ([1, 2], {"max_new_tokens": 0}, "must be greater than 0, but is 0"),
    "unknown option": ([1, 2], {"max_new_token": 3}, "unknown generation options"),
    "unknown drafter": ([1, 2], {"speculation": ["eagle"]}, "unknown drafters"),
    "unknown drafter alone": ([1, 2], {"speculation": "eagle"}, r"unknown drafters \['eagle'\]"),
    "no drafters": ([1, 2], {"speculation": None}, "give True, False, or drafters in a list"),
    "half a seed": ([1, 2], {"seed": 1.5}, "seed is 1.5; give a whole number"),
    "text without tokenizer": ("text", {"max_new_tokens": 3}, "needs a tokenizer"),
    "stop strings without tokenizer": ([1], {"stop_strings": ["a"]}, "need a tokenizer"),
    "beams": ([1, 2], {"num_beams": 2}, "beam search"),
    "prompt lookup": ([1, 2], {"prompt_lookup_num_tokens": 2}, "prompt lookup"),
    "guidance": ([1, 2], {"guidance_scale": 2.0}, "guidance"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_refused_request_says_why_and_disturbs_nobody(case: str) -> None:
    prompt, options, message = REFUSALS[case]
    with Engine(target(), drafters=["ngram"], config=SMALL) as engine:
        ids = submit_all(engine, PROMPTS[:2], max_new_tokens=NEW_TOKENS)
        engine.step()
        before = sorted(live_requests(engine))
        with pytest.raises(SdcontrolError, match=message) as refusal:
            engine.submit(prompt, **options)
        expected = (RequestRefused, ConfigError, UnsupportedGeneration)
        assert isinstance(refusal.value, expected)
        assert sorted(live_requests(engine)) == before
        finished = run_checked(engine)
    for request_id, reference in zip(ids, references(), strict=False):
        assert finished[request_id].output == reference.tokens


def test_an_id_is_free_again_after_its_request_ended() -> None:
    with Engine(target(), config=SMALL) as engine:
        for _ in range(2):
            engine.submit([1, 2], request_id="mine", max_new_tokens=2, do_sample=False)
            assert list(engine.run()) == ["mine"]


def test_names_given_by_the_engine_avoid_those_that_users_chose() -> None:
    with Engine(target(), config=SMALL) as engine:
        engine.submit([1, 2], request_id="request-1", max_new_tokens=2, do_sample=False)
        given = submit_all(engine, [[1, 2]] * 3, max_new_tokens=2)
        assert given == ["request-0", "request-2", "request-3"]


def test_text_prompts_are_tokenized() -> None:
    tokenizer = text_tokenizer()
    with Engine(target(), tokenizer=tokenizer, config=SMALL) as engine:
        engine.submit("abcab", request_id="text", max_new_tokens=3, do_sample=False)
        request = engine.run()["text"]
    assert request.tokens[: request.prompt_tokens] == tokenizer("abcab")["input_ids"]


def test_speculation_can_be_limited_for_each_request() -> None:
    planner = RandomPlanner(seed=6)
    wanted: dict[str, bool | str | list[str]] = {
        "none": False,
        "none of numpy's": np.bool_(False),
        "all": True,
        "some": ["ngram"],
        "named alone": "ngram",
        "one": ["sparse_kv:32"],
    }
    with Engine(
        target(), drafters=["ngram", RECENT, draft_model()], planner=planner, config=SMALL
    ) as engine:
        for name, speculation in wanted.items():
            options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
            engine.submit(PROMPTS[2], request_id=name, speculation=speculation, **options)
        finished = run_checked(engine)
    offered: dict[str, set[str]] = {name: set() for name in wanted}
    for observation in planner.observations:
        for view in observation.view.requests:
            offered[view.id].update(view.drafters)
    assert offered == {
        "none": set(),
        "none of numpy's": set(),
        "all": {"ngram", RECENT, "draft_model"},
        "some": {"ngram"},
        "named alone": {"ngram"},
        "one": {RECENT},
    }
    assert {tuple(r.output) for r in finished.values()} == {tuple(references()[2].tokens)}


# ---- what is observed


@pytest.fixture(scope="module")
def observed() -> Iterator[tuple[list[Observation], Engine]]:
    planner = RandomPlanner(seed=7)
    drafters = ["ngram", RECENT, SCORED, draft_model()]
    with Engine(target(), drafters=drafters, planner=planner, config=SMALL) as engine:
        check_all(engine)
        yield planner.observations, engine


def test_observations_count_what_happened(observed: tuple[list[Observation], Engine]) -> None:
    observations, engine = observed
    assert [o.view.step for o in observations] == list(range(len(observations)))
    for o in observations:
        sizes = {len(o.view.requests)}
        assert {len(o.plan.choices), len(o.drafted), len(o.proposed)} == sizes
        assert {len(o.accepted), len(o.emitted)} == sizes
        rows = zip(o.plan.choices, o.drafted, o.proposed, o.accepted, o.emitted, strict=True)
        for choice, drafted, proposed, accepted, emitted in rows:
            assert choice.num_draft_tokens >= drafted >= proposed >= accepted >= emitted - 1
            assert emitted >= 1
        assert min(o.timing.draft_seconds.values(), default=0.0) >= 0.0
        assert o.timing.verify_seconds > 0.0
        if o.confidence is not None:
            assert [len(row) for row in o.confidence] == list(o.drafted)
    decoded = sum(sum(o.emitted) for o in observations)
    assert decoded + len(PROMPTS) == len(PROMPTS) * NEW_TOKENS
    assert engine.stats.emitted == decoded


def test_stats_are_those_of_every_step_whenever_they_are_asked_for(
    observed: tuple[list[Observation], Engine],
) -> None:
    """However many steps wait to be added up."""
    observations, _ = observed
    alone, seldom, often, nothing = EngineStats(), Tally(), Tally(), RequestLog()

    def told(stats: EngineStats) -> tuple[EngineStats, Mapping[str, RequestHistory]]:
        return replace(stats, history=nothing), stats.requests

    for count, observation in enumerate(observations, start=1):
        alone.add(observation)
        for tally in (seldom, often):
            tally.add(observation)
            assert tally.steps == count
        assert told(often.stats) == told(alone)
    assert len(observations) > 20
    assert told(seldom.stats) == told(alone)
    assert seldom.stats is seldom.stats


def test_an_engine_vouches_for_what_it_observed_and_for_nothing_that_was_changed_since(
    observed: tuple[list[Observation], Engine],
) -> None:
    for one in observed[0]:
        check_observation(one)  # as if it had not
        one.check()
        with pytest.raises(ObservationError):
            replace(one, accepted=(*one.accepted, 1)).check()
    assert any(one.view.requests for one in observed[0])


def test_paths_through_trees_are_observed() -> None:
    """ "5 6" went on in three ways: the n-gram drafter offers them all."""
    prompt = [5, 6, 7, 5, 6, 8, 5, 6, 9, 5, 6]
    planner = BadPlanner()
    with Engine(target(), drafters=["ngram"], planner=planner, config=SMALL) as engine:
        engine.submit(prompt, max_new_tokens=NEW_TOKENS, do_sample=False)
        engine.submit(prompt * 2, max_new_tokens=NEW_TOKENS, do_sample=False)
        engine.run()
    trees = [o for o in planner.observations if o.accepted_nodes is not None]
    assert trees
    for o in trees:
        assert tuple(len(path) for path in o.accepted_nodes or ()) == o.accepted
        assert all(list(path) == sorted(set(path)) for path in o.accepted_nodes or ())


def test_views_say_what_is_left_and_what_is_free(
    observed: tuple[list[Observation], Engine],
) -> None:
    observations, _ = observed
    for o in observations:
        for view in o.view.requests:
            assert view.generated_tokens + view.remaining_tokens == NEW_TOKENS
        assert sum(choice.num_draft_tokens for choice in o.plan.choices) <= o.view.free_kv_tokens


def test_nothing_to_do_is_an_empty_observation() -> None:
    with Engine(target(), config=SMALL) as engine:
        observation = engine.step()
    assert observation.view.requests == ()
    assert observation.emitted == ()


# ---- what was chosen, and why


def test_a_history_says_what_was_known_of_its_own_request() -> None:
    """Two requests of one plan: one whose end was seen before, one that may use no drafter."""
    told = {"ngram": Hint(4, match_tokens=5)}
    requests = (
        RequestView("a", 50, 9, 90, drafters=("ngram",), hints=told),
        RequestView("b", 50, 9, 90),
        RequestView("c", 50, 9, 90, drafters=("ngram",), hints={"ngram": Hint(0)}),
    )
    log = RequestLog()
    for length, accepted in ((2, 1), (4, 0)):
        plan = Plan((Choice.of("ngram", length), Choice.off(), Choice.off()), "memory-bound")
        counts, emitted = (length, 0, 0), (1 + accepted, 1, 1)
        view = BatchView(length, requests, 100)
        log.add(
            Observation(view, plan, counts, counts, (accepted, 0, 0), emitted, Timing({}, 0.01))
        )
    known = {name: [change.known for change in log.requests[name].changes] for name in "abc"}
    assert known == {
        "a": ["ngram match of 5 tokens", "ngram match of 5 tokens, 1 of 2 accepted so far"],
        "b": ["it may use no drafter now"],
        "c": ["ngram has nothing to draft"],
    }
    assert log.requests["b"].lines()[-1].endswith("off: memory-bound; it may use no drafter now")
