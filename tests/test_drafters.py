"""Drafters: what they are held to, what the shipped ones draft, and what bad ones cannot do."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import cast

import pytest
import torch
from structlog.testing import capture_logs
from transformers import PreTrainedModel

from sdcontrol.core import Hint
from sdcontrol.engine.config import EngineConfig
from sdcontrol.engine.drafters import checks
from sdcontrol.engine.drafters import draft_model as draft_model_module
from sdcontrol.engine.drafters.base import Draft, Drafter, DraftRequest, DraftTask
from sdcontrol.engine.drafters.build import build_drafters
from sdcontrol.engine.drafters.checks import CHECKS, MakeDrafter, check_drafter
from sdcontrol.engine.drafters.draft_model import DraftModelDrafter
from sdcontrol.engine.drafters.example import PhraseDrafter
from sdcontrol.engine.drafters.ngram import NgramDrafter
from sdcontrol.engine.drafters.sparse_kv import SparseArm, SparseKVDrafter
from sdcontrol.engine.drafting import Drafting
from sdcontrol.engine.loop import Engine
from sdcontrol.engine.packing import Segment
from sdcontrol.engine.request import Request
from sdcontrol.errors import ConfigError, DrafterFault, UnknownName
from sdcontrol.integrations.settings import arms_of
from tests.engine_support import (
    VOCAB,
    ForcedPlanner,
    RandomPlanner,
    RecordingPlanner,
    TextDrafter,
    generate_alone,
    noised,
    random_prompt,
    run_checked,
    submit_all,
    tiny_model,
)

RECENT, SCORED = "sparse_kv:32", "sparse_kv:40:scored"
SMALL = EngineConfig(block_size=8, max_batch_size=4, max_prefill_tokens=64, kv_tokens=2048)


@cache
def target() -> PreTrainedModel:
    return tiny_model("Llama", seed=21)


@cache
def draft_model() -> PreTrainedModel:
    return noised(target())


# ---- the contract

SHIPPED: dict[str, MakeDrafter] = {
    "ngram tree": NgramDrafter,
    "ngram chain": lambda: NgramDrafter(max_branches=1),
    "phrases": lambda: PhraseDrafter([[1, 2, 3, 4, 5, 6, 7], [9, 3, 4, 8]], match_tokens=1),
}


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_drafters_keep_the_contract(name: str) -> None:
    check_drafter(SHIPPED[name], vocab_size=11)


class Copier(Drafter):
    """Drafts the last token over and over: keeps the contract, and its subclasses do not."""

    name = "copier"

    def propose(
        self, tasks: Sequence[DraftTask], keep_drafting: Callable[[Sequence[Draft]], Sequence[int]]
    ) -> list[Draft]:
        return [self.draft(task) for task in tasks]

    def draft(self, task: DraftTask) -> Draft:
        return Draft.chain([task.request.tokens[-1]] * task.num_draft_tokens)


class NamedForAnother(Copier):
    def arms_for(self, request: DraftRequest) -> tuple[str, ...]:
        return ("ngram",)


class TooLong(Copier):
    def draft(self, task: DraftTask) -> Draft:
        return Draft.chain([0] * (task.num_draft_tokens + 1))


class OutsideVocabulary(Copier):
    def draft(self, task: DraftTask) -> Draft:
        return Draft.chain([10_000])


class Boasting(Copier):
    def hint(self, request: DraftRequest, arm: str) -> Hint:
        return Hint(max_draft_tokens=1)


class Forgetful(Copier):
    """What it drafts depends on how often it was asked."""

    def __init__(self) -> None:
        self.times = 0

    def draft(self, task: DraftTask) -> Draft:
        self.times += 1
        return Draft.chain([self.times % 5])


class Gossip(Copier):
    """Drafts what another request of the batch said."""

    def propose(
        self, tasks: Sequence[DraftTask], keep_drafting: Callable[[Sequence[Draft]], Sequence[int]]
    ) -> list[Draft]:
        return [Draft.chain([tasks[0].request.tokens[-1]]) for _ in tasks]


class Fickle(Copier):
    """Its first token depends on how many were asked for."""

    def draft(self, task: DraftTask) -> Draft:
        return Draft.chain([task.num_draft_tokens])


class StopSensitive(Copier):
    """Drafts something else where it is told to stop early."""

    def propose(
        self, tasks: Sequence[DraftTask], keep_drafting: Callable[[Sequence[Draft]], Sequence[int]]
    ) -> list[Draft]:
        drafts = super().propose(tasks, keep_drafting)
        kept = keep_drafting(drafts)
        return [
            Draft.chain([0]) if limit < len(draft.tokens) else draft
            for draft, limit in zip(drafts, kept, strict=True)
        ]


class CountsCommits(Copier):
    """Takes each commit for one token."""

    def __init__(self) -> None:
        self.commits: dict[str, int] = {}

    def commit(self, request: DraftRequest, num_new_tokens: int) -> None:
        self.commits[request.id] = self.commits.get(request.id, 0) + 1

    def draft(self, task: DraftTask) -> Draft:
        return Draft.chain([self.commits.get(task.request.id, 0) % 5])

    def finish(self, request: DraftRequest) -> None:
        self.commits.pop(request.id, None)


class TellsMany(Copier):
    """Knows of many what it says of none."""

    def offers(self, requests: Sequence[DraftRequest]) -> list[dict[str, Hint | None]]:
        return [{self.name: Hint(max_draft_tokens=len(requests))} for _ in requests]


class CommitsMany(CountsCommits):
    def commit(self, request: DraftRequest, num_new_tokens: int) -> None:
        self.commits[request.id] = len(request.tokens)

    def commit_all(self, committed: Sequence[tuple[DraftRequest, int]]) -> None:
        """Forgets the last one."""
        super().commit_all(committed[:-1])


class Scribbler(Copier):
    def draft(self, task: DraftTask) -> Draft:
        task.request.tokens.append(0)
        return Draft.chain([task.request.tokens.pop()])

    def hint(self, request: DraftRequest, arm: str) -> None:
        request.tokens[0] = 0


class LosesText(Copier):
    """Takes a lost cache for a lost text."""

    def __init__(self) -> None:
        self.lost: set[str] = set()

    def lose_cache(self, request: DraftRequest) -> None:
        self.lost.add(request.id)

    def draft(self, task: DraftTask) -> Draft:
        return Draft() if task.request.id in self.lost else super().draft(task)


class Hoarder(Copier):
    def __init__(self) -> None:
        self.seen: list[DraftRequest] = []

    def start(self, request: DraftRequest) -> None:
        self.seen.append(request)


CULPRITS: dict[Callable[[MakeDrafter, int], None], type[Drafter]] = {
    checks.check_names: NamedForAnother,
    checks.check_drafts_are_possible: TooLong,
    checks.check_hints_are_honest: Boasting,
    checks.check_same_text_same_drafts: Forgetful,
    checks.check_texts_do_not_meet: Gossip,
    checks.check_less_is_a_prefix: Fickle,
    checks.check_commits_add_up: CountsCommits,
    checks.check_many_are_as_one: TellsMany,
    checks.check_requests_are_left_alone: Scribbler,
    checks.check_preemption_changes_nothing: LosesText,
    checks.check_finished_requests_are_forgotten: Hoarder,
}


def test_a_drafter_of_one_method_keeps_the_contract() -> None:
    check_drafter(Copier)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_every_check_finds_its_culprit(check: Callable[[MakeDrafter, int], None]) -> None:
    with pytest.raises(DrafterFault):
        check(CULPRITS[check], 64)


@pytest.mark.parametrize(
    ("check", "culprit"),
    [
        (checks.check_drafts_are_possible, OutsideVocabulary),
        (checks.check_less_is_a_prefix, StopSensitive),
        (checks.check_many_are_as_one, CommitsMany),
    ],
)
def test_checks_find_other_culprits(
    check: Callable[[MakeDrafter, int], None], culprit: type[Drafter]
) -> None:
    with pytest.raises(DrafterFault):
        check(culprit, 64)


def test_the_example_completes_its_phrases_in_an_engine() -> None:
    prompt = random_prompt(30, seed=4)
    reference = generate_alone(target(), prompt, max_new_tokens=20, do_sample=False)
    phrases = PhraseDrafter([[*prompt[-3:], *reference.tokens]])
    planner = ForcedPlanner(arm="phrases", num_draft_tokens=5)
    with Engine(target(), drafters=[phrases], planner=planner, config=SMALL) as engine:
        ids = submit_all(engine, [prompt], max_new_tokens=20)
        assert run_checked(engine)[ids[0]].output == reference.tokens
    assert planner.totals() == (15, 15)  # 4 steps, of which one more token each is the bonus


def test_a_phrase_must_be_longer_than_its_match() -> None:
    with pytest.raises(ConfigError, match="match_tokens 3 with a phrase of 3 tokens"):
        PhraseDrafter([[1, 2, 3]])


# ---- what the shipped ones draft


Known = dict[tuple[int, ...], tuple[int, ...]]


def listen(drafter: Drafter, known: Known) -> list[int]:
    """Compare every draft with what is known of its text; counts the texts that were met again."""
    propose, met = drafter.propose, [0]

    def listening(
        tasks: Sequence[DraftTask], keep: Callable[[Sequence[Draft]], Sequence[int]]
    ) -> Sequence[Draft]:
        texts = [tuple(task.request.tokens) for task in tasks]
        drafts = propose(tasks, keep)
        for text, draft in zip(texts, drafts, strict=True):
            before = known.get(text, ())
            common = min(len(before), len(draft.tokens))
            met[0] += bool(common)
            assert before[:common] == draft.tokens[:common], "drafted otherwise before"
            known[text] = max(before, draft.tokens, key=len)
        return drafts

    drafter.propose = listening  # type: ignore[method-assign]
    return met


@pytest.mark.parametrize("arm", [RECENT, SCORED, "draft_model"])
def test_drafts_depend_on_the_text_alone(arm: str) -> None:
    """Not on plans, trees accepted before, lag, preemption or blocks taken over from others.

    The first engine drafts one token at every place, alone; the second now and then, beside trees.
    """
    prompts = [random_prompt(length, seed=length) for length in (60, 45, 70, 53, 44)]
    options = {"max_new_tokens": 40, "do_sample": False}
    texts = {tuple(p): generate_alone(target(), p, **options).tokens for p in prompts}
    specs = [draft_model() if arm == "draft_model" else arm]
    (alone,), (beside,) = (build_drafters(specs, allow_trees=True) for _ in range(2))
    known: Known = {}
    listen(alone, known)
    config = EngineConfig(block_size=8, max_batch_size=1, kv_tokens=2048, prefix_sharing=False)
    planner = ForcedPlanner(arm=arm, num_draft_tokens=1)
    with Engine(target(), drafters=[alone], planner=planner, config=config) as engine:
        submit_all(engine, prompts, max_new_tokens=40)
        run_checked(engine)
    met = listen(beside, known)
    config = EngineConfig(block_size=8, max_batch_size=4, max_prefill_tokens=40, kv_tokens=216)
    trees = TextDrafter(texts, as_tree=True)
    second = RandomPlanner(seed=2, off=0.2)
    with Engine(target(), drafters=[beside, trees], planner=second, config=config) as engine:
        submit_all(engine, [prompt for prompt in prompts for _ in range(2)], max_new_tokens=40)
        run_checked(engine)
        assert engine.scheduler.num_preemptions > 0
    assert planner.faults() == second.faults() == []
    assert met[0] > 40


def test_a_sparse_budget_is_offered_only_where_it_leaves_something_out() -> None:
    planner = RecordingPlanner()
    with Engine(target(), drafters=[RECENT, SCORED], planner=planner, config=SMALL) as engine:
        submit_all(engine, [random_prompt(28, seed=1)], max_new_tokens=20)
        run_checked(engine)
    for observation in planner.observations[1:]:
        (view,) = observation.view.requests
        budgets = {RECENT: 32, SCORED: 40}
        offered = {arm for arm, budget in budgets.items() if view.context_tokens > budget}
        assert set(view.drafters) == (offered if view.remaining_tokens > 1 else set())


def test_sparse_drafting_reads_its_budget_and_the_uncommitted_pages_only() -> None:
    keys_read: list[int] = []
    planner = ForcedPlanner(arm=RECENT, num_draft_tokens=3)
    with Engine(target(), drafters=[RECENT], planner=planner, config=SMALL) as engine:
        forward = engine.runner.forward

        def listening(segments: Sequence[object], *rest: object) -> object:
            if segments[0].table.shift:
                keys_read.append(segments[0].start + 1 - segments[0].table.shift)
            return forward(segments, *rest)

        engine.runner.forward = listening
        submit_all(engine, [random_prompt(300, seed=2)], max_new_tokens=16)
        run_checked(engine)
    assert len(keys_read) > 20
    assert max(keys_read) <= 32 + 3


def test_a_draft_model_with_a_padded_larger_vocabulary_is_masked() -> None:
    larger = tiny_model("Llama", seed=21, vocab_size=VOCAB + 5)
    planner = ForcedPlanner(arm="draft_model", num_draft_tokens=4)
    prompt = random_prompt(30, seed=3)
    with Engine(target(), drafters=[larger], planner=planner, config=SMALL) as engine:
        ids = submit_all(engine, [prompt], max_new_tokens=30)
        output = run_checked(engine)[ids[0]].output
    assert output == generate_alone(target(), prompt, max_new_tokens=30, do_sample=False).tokens
    assert planner.totals()[0] > 0
    assert planner.faults() == []


def test_a_draft_model_is_not_offered_for_tokens_that_it_lacks() -> None:
    smaller = tiny_model("Llama", seed=21, vocab_size=VOCAB - 5)
    planner = RecordingPlanner()
    prompts = [[1, 2, 3], [1, VOCAB - 1, 3]]
    with Engine(target(), drafters=[smaller], planner=planner, config=SMALL) as engine:
        ids = submit_all(engine, prompts, max_new_tokens=3)
        run_checked(engine)
    first = {view.id: view.drafters for view in planner.observations[1].view.requests}
    assert first[ids[1]] == ()


def test_a_draft_model_of_another_vocabulary_is_refused() -> None:
    other = tiny_model("Llama", vocab_size=2 * VOCAB)
    with pytest.raises(ConfigError, match="use a draft model with the target's tokenizer"):
        Engine(target(), drafters=[other])


def test_catch_up_is_hinted_before_a_lagging_draft_model_is_chosen() -> None:
    planner = RecordingPlanner()
    prompt = random_prompt(50, seed=5)
    with Engine(target(), drafters=[draft_model()], planner=planner, config=SMALL) as engine:
        submit_all(engine, [prompt], max_new_tokens=12)
        run_checked(engine)
    lags = [
        view.hints["draft_model"].catch_up_tokens
        for observation in planner.observations[1:-1]
        for view in observation.view.requests
    ]
    assert lags == [len(prompt) + step for step in range(len(lags))]


def test_a_lagging_draft_model_catches_up_in_forwards_of_bounded_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many requests lag, and whatever they draft is the same."""
    prompts = [random_prompt(length, seed=length) for length in (33, 20, 47, 2)]
    found: list[list[tuple[int, ...]]] = []
    for most in (draft_model_module.CATCH_UP_TOKENS, 7):
        monkeypatch.setattr(draft_model_module, "CATCH_UP_TOKENS", most)
        planner, sizes = ForcedPlanner(arm="draft_model", num_draft_tokens=3), list[int]()
        with Engine(target(), drafters=[draft_model()], planner=planner, config=SMALL) as engine:
            runner = engine._host.runners["draft_model"]

            def listening(
                segments: Sequence[Segment],
                queries: object = None,
                forward: Callable[..., object] = runner.forward,
                sizes: list[int] = sizes,
            ) -> object:
                sizes.append(sum(len(segment.tokens) for segment in segments))
                return forward(segments, queries)

            runner.forward = listening  # type: ignore[method-assign, assignment]
            submit_all(engine, prompts, max_new_tokens=12)
            run_checked(engine)
        found.append([observation.accepted for observation in planner.observations])
        assert planner.faults() == []
    assert max(sizes) == 7
    assert found[0] == found[1]
    assert sum(map(sum, found[0])) > 10


@pytest.mark.parametrize(
    "name", ["sparse_kv:x", "sparse_kv", "sparse_kv:64:best", "sparse_kv:0", "sparse_kv:64:scored:"]
)
def test_a_budget_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="sparse_kv"):
        SparseArm.parse(name)


def test_names_and_budgets_that_cannot_be_are_refused() -> None:
    with pytest.raises(UnknownName, match="no drafter is called 'eagle'"):
        build_drafters(["eagle"], allow_trees=True)
    with pytest.raises(ConfigError, match="distinct budgets"):
        SparseKVDrafter([SparseArm(64), SparseArm(64)])
    with pytest.raises(ConfigError, match="raise it to at least 32"):
        Engine(target(), drafters=["sparse_kv:24"], config=SMALL)
    with pytest.raises(ConfigError, match="two drafters are named 'draft_model'"):
        Engine(target(), drafters=[draft_model(), draft_model()], config=SMALL)
    for spec in (NgramDrafter(), "sparse_kv:512"):
        with pytest.raises(ConfigError, match="stands under the name 'other'"):
            build_drafters({"other": spec}, allow_trees=True)


def test_a_mapping_names_its_drafters() -> None:
    built = build_drafters({"small": draft_model(), "copy": "ngram"}, allow_trees=False)
    assert {drafter.name: type(drafter) for drafter in built} == {
        "small": DraftModelDrafter,
        "copy": NgramDrafter,
    }
    specs = {"copy": "ngram", "sparse_kv": "sparse_kv:512"}
    built = build_drafters(specs, allow_trees=False)
    assert {arm for drafter in built for arm in drafter.arms} == {"copy", "sparse_kv:512"}
    assert set(arms_of(specs)) == {"copy", "sparse_kv:512"}


# ---- what bad ones cannot do


class Culprit(Copier):
    """Fine for two steps, then does what it was made for."""

    name = "culprit"

    def __init__(self, crime: Callable[[DraftTask], Draft]) -> None:
        self._crime = crime
        self.num_asked = 0

    def draft(self, task: DraftTask) -> Draft:
        self.num_asked += 1
        return self._crime(task) if self.num_asked > 2 else super().draft(task)


def raising(task: DraftTask) -> Draft:
    raise ZeroDivisionError("a bug of the drafter's")


CRIMES: dict[str, Callable[[DraftTask], object]] = {
    "raises": raising,
    "too many tokens": lambda task: Draft.chain([1] * (task.num_draft_tokens + 1)),
    "token out of range": lambda task: Draft.chain([VOCAB]),
    "negative token": lambda task: Draft.chain([-1]),
    "token that is no int": lambda task: Draft.chain([1.0]),
    "parents after children": lambda task: Draft((1, 2), (-1, 1)),
    "parents below the root": lambda task: Draft((1, 2), (-1, -2)),
    "fewer parents than tokens": lambda task: Draft((1, 2), (-1,)),
    "siblings alike": lambda task: Draft((1, 1), (-1, -1)),
    "confidence is no number": lambda task: Draft.chain([1], [math.nan]),
    "confidence above one": lambda task: Draft.chain([1], [1.5]),
    "confidence for another count": lambda task: Draft.chain([1, 2], [0.5]),
    "distribution of another shape": lambda task: Draft.chain([1], (), torch.ones(1, 3) / 3),
    "distribution is no number": lambda task: Draft.chain(
        [1], (), torch.full((1, VOCAB), math.nan)
    ),
    "two drafts in one": lambda task: ((1,), (-1,), (), None),
    "no draft at all": lambda task: None,
    "another type": lambda task: [1, 2, 3],
}


def run_with(drafter: Drafter, planner: RecordingPlanner, num_new: int = 14) -> Engine:
    """An engine that ran three prompts beside n-gram drafts; fails unless the text is right."""
    prompts = [random_prompt(length, seed=length) for length in (9, 30, 44)]
    with Engine(target(), drafters=["ngram", drafter], planner=planner, config=SMALL) as engine:
        ids = submit_all(engine, prompts, max_new_tokens=num_new)
        finished = run_checked(engine)
    for request_id, prompt in zip(ids, prompts, strict=True):
        reference = generate_alone(target(), prompt, max_new_tokens=num_new, do_sample=False)
        assert finished[request_id].output == reference.tokens
    return engine


@pytest.mark.parametrize("crime", CRIMES)
def test_nonsense_is_quarantined_logged_and_counted_and_changes_no_text(crime: str) -> None:
    planner = RandomPlanner(seed=1, off=0.0, shorten=0.0)
    culprit = Culprit(CRIMES[crime])
    with capture_logs() as logs:
        engine = run_with(culprit, planner)
    assert list(engine.drafting.quarantined) == ["culprit"]
    assert [log["family"] for log in logs if log["event"] == "drafter_quarantined"] == ["culprit"]
    (fault,) = planner.faults()
    assert fault.startswith("drafter culprit quarantined")
    struck = next(i for i, o in enumerate(planner.observations) if o.faults)
    later = planner.observations[struck + 1 :]
    assert later
    assert all("culprit" not in view.drafters for o in later for view in o.view.requests)
    assert any("ngram" in view.drafters for o in later for view in o.view.requests)


class Meddler(Copier):
    """Fails in one method."""

    name = "culprit"

    def __init__(self, method: str, answer: object = None) -> None:
        def fail(*_: object) -> object:
            if answer is None:
                raise RuntimeError(f"bug in {method}")
            return answer

        setattr(self, method, fail)


@pytest.mark.parametrize(
    "drafter",
    [
        *(Meddler(m) for m in ("start", "arms_for", "hint", "commit", "finish", "propose")),
        Meddler("arms_for", ("ngram:2", "culprit")),
        Meddler("hint", "lots"),
        Meddler("hint", Hint(confidence=math.nan)),
        Meddler("hint", Hint(max_draft_tokens=-1)),
        Meddler("offers"),
        Meddler("offers", []),
        Meddler("offers", 7),
        Meddler("offers", [{"ngram": None}] * 3),
        Meddler("commit_all"),
        Meddler("propose", []),
        Meddler("propose", 7),
    ],
    ids=lambda drafter: next(iter(vars(drafter))),
)
def test_a_drafter_that_fails_in_any_method_is_quarantined(drafter: Drafter) -> None:
    planner = RandomPlanner(seed=2, off=0.0)
    engine = run_with(drafter, planner)
    assert list(engine.drafting.quarantined) == ["culprit"]
    assert len(planner.faults()) == 1


def test_a_fault_with_the_last_token_is_counted_too() -> None:
    engine = run_with(Meddler("finish"), planner := RandomPlanner(seed=3))
    assert engine.stats.faults == planner.faults()
    assert len(engine.stats.faults) == 1


def test_a_quarantined_drafter_with_a_model_leaves_nothing_behind() -> None:
    """Its requests end and their rows are free again: many more can come than run at once."""
    planner = ForcedPlanner(arm=SCORED, num_draft_tokens=2)
    with Engine(target(), drafters=[SCORED], planner=planner, config=SMALL) as engine:
        prompts = [random_prompt(50, seed=seed) for seed in range(3 * SMALL.max_batch_size)]
        submit_all(engine, prompts[:2], max_new_tokens=6)
        run_checked(engine)
        engine.drafting.quarantine.put("sparse_kv", RuntimeError("out of memory"))
        submit_all(engine, prompts, max_new_tokens=6)
        assert len(run_checked(engine)) == len(prompts)


def test_requests_that_opted_out_of_scored_pages_come_and_go() -> None:
    planner = ForcedPlanner(arm=SCORED, num_draft_tokens=2)
    with Engine(target(), drafters=[SCORED], planner=planner, config=SMALL) as engine:
        prompts = [random_prompt(50, seed=seed) for seed in range(3 * SMALL.max_batch_size)]
        for prompt in prompts:
            engine.submit(prompt, max_new_tokens=4, do_sample=False, speculation=False)
        assert len(run_checked(engine)) == len(prompts)
    assert planner.totals() == (0, 0)


@dataclass
class Member:
    """A request that may use some families."""

    id: str
    tokens: list[int]
    families: frozenset[str]

    def may_draft(self, family: str) -> bool:
        return family in self.families


class Silent(Copier):
    """Has nothing to say beforehand, and hears what was committed."""

    name = "silent"

    def __init__(self) -> None:
        self.heard: list[tuple[str, int]] = []

    def commit(self, request: DraftRequest, num_new_tokens: int) -> None:
        self.heard.append((request.id, num_new_tokens))


def test_each_drafter_is_told_of_the_requests_that_may_use_it() -> None:
    silent, ngram = Silent(), NgramDrafter()
    drafting = Drafting([silent, ngram], vocab_size=VOCAB, allow_trees=True, max_draft_tokens=4)
    families = [("silent",), ("silent", "ngram"), (), ("ngram",)]
    requests = [
        cast(Request, Member(str(number), [1, 2, 1], frozenset(names)))
        for number, names in enumerate(families)
    ]
    for request in requests:
        drafting.start(request)
        request.tokens.append(2)
    drafting.commit([(request, 1) for request in requests])
    assert silent.heard == [("0", 1), ("1", 1)]
    hint = ngram.hint(requests[1], "ngram")
    assert hint.match_tokens == 2
    offers = drafting.offers(requests)
    assert [arms for arms, _ in offers] == families
    assert [known for _, known in offers] == [{}, {"ngram": hint}, {}, {"ngram": hint}]
    drafting.quarantine.put("ngram", RuntimeError("enough"))
    assert [arms for arms, _ in drafting.offers(requests)] == [("silent",), ("silent",), (), ()]
    drafting.is_idle = True
    drafting.commit([(request, 1) for request in requests])
    assert len(silent.heard) == 2
    assert drafting.offers(requests) == [((), {})] * 4


def test_no_draft_is_longer_than_the_engine_allows() -> None:
    planner = ForcedPlanner(arm="culprit", num_draft_tokens=50)
    config = SMALL.model_copy(update={"max_draft_tokens": 5})
    drafter = Meddler("finish", answer=0)
    with Engine(target(), drafters=[drafter], planner=planner, config=config) as engine:
        submit_all(engine, [random_prompt(20, seed=1)], max_new_tokens=60)
        run_checked(engine)
    assert max(max(o.drafted, default=0) for o in planner.observations) == 5
    assert planner.faults() == []
