"""Drafting rounds that never ask the host: the same drafts, with and without graphs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from sdcontrol.core import BatchView, Choice, Confidence, Observation, Plan
from sdcontrol.engine.chained_forwards import ChainedForwards
from sdcontrol.engine.config import EngineConfig
from sdcontrol.engine.drafters import rounds
from sdcontrol.engine.drafters.base import Draft, DraftTask
from sdcontrol.engine.drafters.pages import PageScorer
from sdcontrol.engine.drafters.sparse_kv import SparseKVDrafter
from sdcontrol.engine.generation import decoding_of, prepare_config
from sdcontrol.engine.loop import Engine
from sdcontrol.engine.packing import Segment
from sdcontrol.engine.request import Request
from sdcontrol.engine.sampling import process_rows
from sdcontrol.engine.static_inputs import StaticInputs
from tests.engine_support import (
    VOCAB,
    RecordingPlanner,
    noised,
    random_prompt,
    run_checked,
    submit_all,
    tiny_model,
)
from tests.graph_support import CPU, FakeRecorder, Waits, use_fake_graphs

PROMPTS = [random_prompt(length, seed=length) for length in (5, 60, 33, 90, 21, 50, 75)]
CONFIG = EngineConfig(kv_tokens=4096, max_prefill_tokens=120, max_batch_size=6, block_size=8)
SPARSE = ("sparse_kv:32", "sparse_kv:40:scored")


@cache
def target() -> PreTrainedModel:
    return tiny_model("Llama", seed=91)


@cache
def draft_model(vocab: int = VOCAB) -> PreTrainedModel:
    if vocab == VOCAB:
        return noised(target(), noise=0.02)
    return tiny_model("Llama", seed=92, vocab_size=vocab)


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield monkeypatch


class Ragged(RecordingPlanner):
    """Lengths from 0 to 7, another for every request and step; every arm in turn."""

    def __init__(self, *, refines: bool) -> None:
        super().__init__()
        self.refines = refines

    def plan(self, view: BatchView) -> Plan:
        choices, free = [], view.free_kv_tokens
        for row, request in enumerate(view.requests):
            length = min((5 * view.step + 3 * row) % 8, request.remaining_tokens - 1, free)
            arms = request.drafters
            arm = arms[(view.step + row // 2) % len(arms)] if arms else ""
            choices.append(Choice.of(arm, length) if arm and length > 0 else Choice.off())
            free -= choices[-1].num_draft_tokens
        return Plan(tuple(choices))


GREEDY, SAMPLED = {"do_sample": False}, {"do_sample": True}
COOL = {"do_sample": True, "temperature": 0.5, "top_k": 20}
MIXED = (GREEDY, SAMPLED, COOL)


def observed(
    drafters: Sequence[object],
    options: Sequence[dict[str, object]],
    *,
    refines: bool,
    verification: str = "coupled",
) -> tuple[list[Observation], list[list[int]], Engine]:
    planner = Ragged(refines=refines)
    engine = Engine(
        target(),
        drafters=drafters,  # type: ignore[arg-type]
        planner=planner,
        verification=verification,
        config=CONFIG,
    )
    with engine:
        names = [
            engine.submit(prompt, max_new_tokens=18 + index, seed=index, **own)  # type: ignore[arg-type]
            for index, prompt in enumerate(PROMPTS)
            for own in [options[index % len(options)]]
        ]
        finished = run_checked(engine)
        assert engine.stats.faults == []
        return planner.observations, [finished[name].output for name in names], engine


def check_same(one: Sequence[Observation], other: Sequence[Observation]) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert (a.plan, a.drafted, a.proposed) == (b.plan, b.drafted, b.proposed)
        assert (a.accepted, a.emitted) == (b.accepted, b.emitted)
        assert (a.confidence is None) == (b.confidence is None)
        for mine, theirs in zip(a.confidence or (), b.confidence or (), strict=True):
            assert mine == pytest.approx(theirs, abs=1e-5)
    assert sum(sum(o.accepted) for o in one) > 0
    assert any(len({n for n in o.drafted if n}) > 2 for o in one), "no ragged step"


def count_calls(patch: pytest.MonkeyPatch) -> dict[str, int]:
    """From now on: samples that the host was asked for, and forwards that it was not."""
    calls = {"asked": 0, "chained": 0}
    draft_sample, forward = rounds.draft_sample, ChainedForwards.forward

    def asking(*args: object, **keywords: object) -> object:
        calls["asked"] += 1
        return draft_sample(*args, **keywords)  # type: ignore[arg-type]

    def chaining(self: ChainedForwards, tokens: object) -> object:
        calls["chained"] += 1
        return forward(self, tokens)  # type: ignore[arg-type]

    patch.setattr(rounds, "draft_sample", asking)
    patch.setattr(ChainedForwards, "forward", chaining)
    return calls


@pytest.mark.parametrize("with_graphs", [False, True])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("draft_model", (GREEDY,)),
        ("draft_model", MIXED),
        ("sparse_kv", MIXED),
        ("both", (SAMPLED,)),
    ],
)
def test_drafts_are_those_of_rounds_that_ask_the_host(
    patch: pytest.MonkeyPatch, kind: str, options: Sequence[dict[str, object]], with_graphs: bool
) -> None:
    """Tokens, confidences, acceptances, text; requests leave the rounds early, and the batch."""
    drafters = [
        *(SPARSE if kind != "draft_model" else ()),
        *([draft_model()] if kind != "sparse_kv" else []),
    ]
    expected, text, _ = observed(drafters, options, refines=True)
    calls = count_calls(patch)
    recorder = use_fake_graphs(patch) if with_graphs else FakeRecorder()
    ours, same_text, engine = observed(drafters, options, refines=False)
    assert same_text == text
    check_same(ours, expected)
    assert calls["asked"] == 0
    assert calls["chained"] > 20
    assert (recorder.replays > calls["chained"]) == with_graphs
    assert set(engine.stats.graphs.eager) == ({"prefill or catch-up"} if with_graphs else set())


class Even(RecordingPlanner):
    """As many tokens for everybody, from scored pages."""

    refines = False

    def plan(self, view: BatchView) -> Plan:
        return Plan.uniform(view, SPARSE[1], 3)


def test_where_caches_lag_the_first_round_is_asked_for_before_the_others_are_made_ready(
    patch: pytest.MonkeyPatch,
) -> None:
    """The device computes it meanwhile: what it waits for the host is the first round's own."""
    done: list[str] = []
    forward, prepare = rounds.RoundModel.forward, ChainedForwards.__init__

    def first(self: rounds.RoundModel, segments: Sequence[Segment]) -> Tensor:
        done.append("first round" if any(len(s.tokens) > 1 for s in segments) else "other")
        return forward(self, segments)

    def others(self: ChainedForwards, *args: object) -> None:
        done.append("others")
        prepare(self, *args)  # type: ignore[arg-type]

    patch.setattr(rounds.RoundModel, "forward", first)
    patch.setattr(ChainedForwards, "__init__", others)
    observed((draft_model(),), (GREEDY,), refines=False)
    lagging = [place for place, name in enumerate(done) if name == "first round"]
    followed = [done[place + 1 : place + 2] for place in lagging]
    assert followed.count(["others"]) > 5
    assert "other" not in done  # nobody who does not lag is computed so


def test_page_tables_are_filled_once_for_all_rounds_of_a_draft(patch: pytest.MonkeyPatch) -> None:
    """Those of scored pages are by layer and head, megabytes at 64 requests."""
    recorder, filled, fills = use_fake_graphs(patch), 0, list[int]()
    load, propose = StaticInputs.load, SparseKVDrafter.propose

    def loading(self: StaticInputs, *args: object) -> list[int]:
        nonlocal filled
        filled += 1
        return load(self, *args)  # type: ignore[arg-type]

    def proposing(self: SparseKVDrafter, *args: object) -> list[Draft]:
        before = filled - recorder.captures  # a capture fills them once more
        drafts = propose(self, *args)  # type: ignore[arg-type]
        if len({len(draft.tokens) for draft in drafts}) == 1:  # else fewer go on, in another graph
            fills.append(filled - recorder.captures - before)
        return drafts

    patch.setattr(StaticInputs, "load", loading)
    patch.setattr(SparseKVDrafter, "propose", proposing)
    planner = Even()
    config = CONFIG.model_copy(update={"max_draft_tokens": 3})
    with Engine(target(), drafters=SPARSE, planner=planner, config=config) as engine:
        submit_all(engine, PROMPTS[3:], max_new_tokens=40)
        run_checked(engine)
        assert engine.stats.faults == []
        assert engine.stats.graphs.eager.keys() == {"prefill or catch-up"}
    assert len(fills) > 10
    assert set(fills) == {1}


@pytest.mark.parametrize("with_graphs", [True, False])
def test_steps_may_be_taken_inside_and_outside_of_inference_mode(
    patch: pytest.MonkeyPatch, with_graphs: bool
) -> None:
    """Whatever was made inside, an engine's own tensors are written to outside."""
    drafters = [*SPARSE, draft_model()]
    _, text, _ = observed(drafters, [GREEDY], refines=True)
    if with_graphs:
        use_fake_graphs(patch)
    with torch.inference_mode():
        engine = Engine(target(), drafters=drafters, planner=Ragged(refines=True), config=CONFIG)
        for index, prompt in enumerate(PROMPTS):
            engine.submit(prompt, max_new_tokens=18 + index, seed=index, **GREEDY)  # type: ignore[arg-type]
        live = list(engine.requests.values())
        for _ in range(4):
            engine.step()
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            engine.step()
    engine.run()
    assert [request.output for request in live] == text
    assert engine.stats.faults == []
    scorer = engine._host.scorer
    engine.close()
    assert isinstance(scorer, PageScorer)
    assert (scorer._queries, scorer._bounds) == (None, None)


@pytest.mark.parametrize("vocab", [VOCAB - 3, VOCAB + 6])
def test_a_draft_model_of_another_padding_drafts_alike(vocab: int) -> None:
    expected, text, _ = observed([draft_model(vocab)], MIXED, refines=True)
    ours, same_text, _ = observed([draft_model(vocab)], MIXED, refines=False)
    assert same_text == text
    for a, b in zip(ours, expected, strict=True):
        assert (a.plan, a.drafted, a.accepted, a.emitted) == (
            b.plan,
            b.drafted,
            b.accepted,
            b.emitted,
        )


@dataclass(frozen=True)
class OnDevice:
    """A runner beside kernels, as far as a sampler knows it."""

    has_kernels: bool = True
    device: torch.device = CPU


def processed(
    options: Sequence[dict[str, object]], num_open: int
) -> tuple[Tensor, Tensor, list[str]]:
    """Scores of a round in which so many chains are open, as they should be, and who waited."""
    tasks = []
    for own in options:
        config = prepare_config(target(), None, 2, {"max_new_tokens": 9, "do_sample": True, **own})
        decoding = decoding_of(target(), config, [1, 2], seed=1)
        request = Request(
            "r", [1, 2], sampler=decoding.sampler, rules=decoding.rules, temperature=1.0,
            may_draft=bool,
        )  # fmt: skip
        tasks.append(DraftTask(request, "draft_model", 3))
    chains = [rounds._Chain(task) for task in tasks]
    sampler = rounds._RoundSampler(chains, OnDevice())  # type: ignore[arg-type]
    logits = torch.randn(num_open, VOCAB, generator=torch.Generator().manual_seed(1))
    with Waits() as waits:
        ours = sampler._processed(logits.clone())
    return ours, process_rows(logits, [chain.row for chain in chains[:num_open]]), waits.seen


WARPERS = ({}, {"temperature": 0.5}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 7})


@pytest.mark.parametrize("num_open", range(1, len(WARPERS) + 1))
def test_processors_between_rounds_never_wait_for_the_device(num_open: int) -> None:
    ours, expected, waits = processed(WARPERS, num_open)
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)
    assert waits == []


def test_a_processor_that_looks_at_its_scores_on_the_host_does_wait(
    patch: pytest.MonkeyPatch,
) -> None:
    """Or the test above could not fail. It looks where torch validates distributions."""
    patch.setattr(torch.distributions.Distribution, "_validate_args", True)
    assert processed([{"eta_cutoff": 0.1}, {}], 2)[2]


def test_where_a_sample_needs_its_law_the_host_is_asked(patch: pytest.MonkeyPatch) -> None:
    calls = count_calls(patch)
    observed([draft_model()], (SAMPLED,), refines=False, verification="rejection")
    assert calls["chained"] == 0
    observed([draft_model()], (GREEDY,), refines=False, verification="rejection")
    assert calls["chained"] > 20


@pytest.mark.parametrize("refines", [False, True])
def test_greedy_and_sampled_requests_draft_beside_each_other_under_rejection(
    *, refines: bool
) -> None:
    """Who is greedy goes on where the others' drafts have ended, and has no law of its tokens."""
    drafters = [*SPARSE, draft_model()]
    _, expected, _ = observed(drafters, MIXED, refines=refines)
    _, text, _ = observed(drafters, MIXED, refines=refines, verification="rejection")
    assert text[:: len(MIXED)] == expected[:: len(MIXED)]


def test_processors_that_look_back_are_asked_by_the_host(patch: pytest.MonkeyPatch) -> None:
    options = ({"do_sample": True, "repetition_penalty": 1.3},)
    expected, text, _ = observed([draft_model()], options, refines=True)
    calls = count_calls(patch)
    ours, same_text, _ = observed([draft_model()], options, refines=False)
    assert same_text == text
    check_same(ours, expected)
    assert calls["chained"] == 0


def test_a_bucket_that_cannot_be_captured_is_drafted_eagerly(patch: pytest.MonkeyPatch) -> None:
    expected, text, _ = observed([draft_model()], MIXED, refines=True)
    use_fake_graphs(patch, failure="operation not permitted")
    ours, same_text, engine = observed([draft_model()], MIXED, refines=False)
    assert same_text == text
    check_same(ours, expected)
    assert engine.stats.graphs.replayed == 0
    assert engine.stats.graphs.eager["capture failed"] > 20


def test_a_planner_may_refine_once_in_the_end(patch: pytest.MonkeyPatch) -> None:
    """It is shown every draft in full, and what it leaves is verified."""

    class Once(Ragged):
        refines_between_rounds = False
        asked = 0

        def refine(self, view: BatchView, plan: Plan, confidence: Confidence) -> Plan:
            self.asked += 1
            lengths = [choice.num_draft_tokens for choice in plan.choices]
            assert [len(row) for row in confidence] == lengths
            return Plan(
                tuple([Choice.of(c.drafter or "", c.num_draft_tokens // 2) for c in plan.choices])
            )

    calls = count_calls(patch)
    planner = Once(refines=True)
    with Engine(target(), drafters=[draft_model()], planner=planner, config=CONFIG) as engine:
        submit_all(engine, PROMPTS[:4], max_new_tokens=20)
        run_checked(engine)
    assert calls["asked"] == 0
    assert calls["chained"] > 10
    drafting = [o for o in planner.observations if any(o.drafted)]
    assert planner.asked == len(drafting)
    for o in drafting:
        assert list(o.drafted) == [choice.num_draft_tokens for choice in o.plan.choices]
        assert list(o.proposed) == [n // 2 for n in o.drafted]


def test_a_plan_that_heeds_no_confidence_is_drafted_in_full(patch: pytest.MonkeyPatch) -> None:
    """And a planner that cannot say is asked after every round."""

    class Deaf(Ragged):
        def heeds(self, plan: Plan) -> bool:
            return False

    class Broken(Ragged):
        def heeds(self, plan: Plan) -> bool:
            raise ValueError("no")

    calls, texts = count_calls(patch), []
    for planner, has_chains in ((Deaf(refines=True), True), (Broken(refines=True), False)):
        calls.update(asked=0, chained=0)
        with Engine(target(), drafters=[draft_model()], planner=planner, config=CONFIG) as engine:
            submit_all(engine, PROMPTS[:4], max_new_tokens=20)
            texts.append([request.output for request in run_checked(engine).values()])
        assert (calls["chained"] > 10) == has_chains
        assert (calls["asked"] > 10) != has_chains
        assert bool(planner.faults()) != has_chains
    assert texts[0] == texts[1]


def test_a_planner_that_never_refines_is_never_asked_to() -> None:
    class Never(Ragged):
        def refine(self, *_: object) -> Plan:
            raise AssertionError("asked")

    planner = Never(refines=False)
    with Engine(
        target(), drafters=["ngram", draft_model()], planner=planner, config=CONFIG
    ) as engine:
        engine.submit(PROMPTS[1], max_new_tokens=12, do_sample=False)
        engine.run()
    assert planner.faults() == []
    assert planner.totals()[0] > 0
