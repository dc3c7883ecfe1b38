"""Sampling through the engine: reproducible under `coupled`, of the model's law under both rules.

The chi-square tests have fixed seeds. With other seeds a correct engine would fail each of them
once in a thousand times, the threshold of p; the broken rules are found at p < 1e-9.
"""

import itertools
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
)

from sdcontrol.core import BatchView, Choice, Confidence, Plan
from sdcontrol.engine.config import EngineConfig
from sdcontrol.engine.generation import Decoding
from sdcontrol.engine.loop import Engine
from sdcontrol.engine.request import StopRules
from sdcontrol.engine.sampling import RowSampler
from sdcontrol.engine.verify import CoupledVerifier, RejectionVerifier, Verifier
from sdcontrol.engine.walk import Walk
from tests.engine_support import (
    ForcedPlanner,
    RandomPlanner,
    RecordingPlanner,
    noised,
    random_prompt,
    run_checked,
    tiny_model,
)

# ---- the same seeds, the same text

NEW_TOKENS = 20
RECENT, SCORED = "sparse_kv:32", "sparse_kv:40:scored"
SETTINGS: tuple[Mapping[str, object], ...] = (
    {"temperature": 1.0, "top_k": 0},
    {"temperature": 0.7, "top_k": 8},
    {"temperature": 1.3, "top_p": 0.8, "top_k": 0},
    {"min_p": 0.1, "top_k": 0},
    {"typical_p": 0.7, "top_k": 0},
    {"temperature": 0.8, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    {"do_sample": False},
)


@cache
def target() -> PreTrainedModel:
    return tiny_model("Llama", seed=51)


@cache
def draft_model() -> PreTrainedModel:
    return noised(target())


Jobs = Sequence[tuple[str, list[int], int, Mapping[str, object]]]


@cache
def jobs() -> Jobs:
    """Name, prompt, seed and settings of requests."""
    lengths = (5, 33, 47, 20, 12, 60, 41)
    return tuple(
        (f"{index}.{seed}", random_prompt(length, seed=length), 100 * index + seed, settings)
        for seed in range(2)
        for index, (length, settings) in enumerate(zip(lengths, SETTINGS, strict=True))
    )


def texts(
    these: Jobs, planner: RecordingPlanner | None, max_batch_size: int = 8, kv_tokens: int = 2048
) -> dict[str, list[int]]:
    config = EngineConfig(
        block_size=8, max_batch_size=max_batch_size, max_prefill_tokens=64, kv_tokens=kv_tokens
    )
    drafters = ["ngram", RECENT, SCORED, draft_model()]
    with Engine(target(), drafters=drafters, planner=planner, config=config) as engine:
        for name, prompt, seed, settings in these:
            options = {"max_new_tokens": NEW_TOKENS, "do_sample": True, **settings}
            engine.submit(prompt, request_id=name, seed=seed, **options)
        return {name: request.output for name, request in run_checked(engine).items()}


@cache
def alone() -> Mapping[str, list[int]]:
    """The texts without drafts and without company."""
    return texts(jobs(), None, max_batch_size=1)


def test_seeds_and_settings_make_different_texts() -> None:
    """Or the tests below would compare little."""
    assert len({tuple(text) for text in alone().values()}) == len(jobs()) - 1  # greedy twice


@pytest.mark.parametrize("arm", ["ngram", RECENT, SCORED, "draft_model"])
def test_coupled_text_is_the_same_under_a_static_plan(arm: str) -> None:
    planner = ForcedPlanner(arm=arm, num_draft_tokens=4)
    assert texts(jobs(), planner) == alone()
    proposed, accepted = planner.totals()
    assert 0 < accepted < proposed


@pytest.mark.parametrize("seed", range(3))
def test_coupled_text_is_the_same_under_random_plans_in_any_company(seed: int) -> None:
    planner = RandomPlanner(seed)
    shuffled = random.Random(seed).sample(jobs(), len(jobs()))
    batch, kv_tokens = ((3, 2048), (14, 2048), (8, 280))[seed]
    assert texts(shuffled, planner, batch, kv_tokens) == alone()
    assert planner.faults() == []


def test_coupled_text_is_the_same_when_some_of_the_others_are_gone() -> None:
    few = jobs()[1::3]
    assert texts(few, RandomPlanner(9)) == {name: alone()[name] for name, *_ in few}


def test_coupled_drafting_with_the_targets_noise_is_accepted_more_often_than_with_none() -> None:
    """The draft model samples with the noise of the target, so that it picks the same tokens."""
    sampled = [job for job in jobs() if job[3].get("do_sample", True)]
    planner = ForcedPlanner(arm="draft_model", num_draft_tokens=2)
    texts(sampled, planner)
    proposed, accepted = planner.totals()
    assert accepted / proposed > 0.4


def test_without_a_seed_torchs_generator_decides() -> None:
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        with Engine(target(), config=EngineConfig(kv_tokens=256)) as engine:
            engine.submit([1, 2, 3], request_id="it", max_new_tokens=12, do_sample=True)
            outputs.append(engine.run()["it"].output)
    assert outputs[0] == outputs[1] != outputs[2]


# ---- the law

VOCAB = 4
LENGTH = 4  # the first token comes with the prompt, then two drafts and a bonus token
TEXTS = 1000
PROMPT = [1, 2, 3, 1, 2, 3, 1]


@cache
def tiny_target() -> PreTrainedModel:
    return tiny_model("Llama", seed=52, vocab_size=VOCAB, initializer_range=0.15)


@cache
def tiny_draft_model() -> PreTrainedModel:
    return noised(tiny_target(), noise=0.5)


def processors(has_prefix_processor: bool) -> LogitsProcessorList:
    made = [TemperatureLogitsWarper(0.9)]
    if has_prefix_processor:
        made.insert(0, RepetitionPenaltyLogitsProcessor(1.5))
    return LogitsProcessorList(made)


@cache
def exact_law(has_prefix_processor: bool) -> Mapping[tuple[int, ...], float]:
    """The probability of every text, from the model itself."""
    process = processors(has_prefix_processor)
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        ids = torch.tensor([[*PROMPT, *text] for text in law])
        with torch.no_grad():
            scores = process(ids, tiny_target()(ids).logits[:, -1].float()).double()
        rows = scores.softmax(-1).tolist()
        law = {
            (*text, token): before * row[token]
            for (text, before), row in zip(law.items(), rows, strict=True)
            for token in range(VOCAB)
        }
    return law


class Shortening(RandomPlanner):
    """Two draft tokens or one or none, whichever arm; sometimes cut afterwards."""

    def plan(self, view: BatchView) -> Plan:
        self._most = 2
        return super().plan(view)


def sample_texts(
    verification: str | Verifier, planner: RecordingPlanner | None, has_prefix_processor: bool
) -> Counter[tuple[int, ...]]:
    config = EngineConfig(block_size=8, max_batch_size=64, kv_tokens=4096, max_prefill_tokens=2048)
    shared = processors(has_prefix_processor)
    rules = StopRules(max_new_tokens=LENGTH)
    with Engine(
        tiny_target(),
        drafters=["ngram", tiny_draft_model()],
        planner=planner,
        verification=verification,
        config=config,
    ) as engine:
        for seed in range(TEXTS):
            sampler = RowSampler(processors=shared, do_sample=True, seed=seed)
            engine.enqueue(PROMPT, Decoding(sampler, rules, 0.9))
        return Counter(tuple(request.output) for request in engine.run().values())


def p_value(counts: Counter[tuple[int, ...]], law: Mapping[tuple[int, ...], float]) -> float:
    """Chi-square of the counts; texts that are too rare for it are taken together."""
    expected = {text: TEXTS * law[text] for text in itertools.product(range(VOCAB), repeat=LENGTH)}
    common = [text for text, number in expected.items() if number >= 5]
    seen = np.array([counts[text] for text in common], dtype=float)
    hoped = np.array([expected[text] for text in common])
    seen, hoped = np.append(seen, TEXTS - seen.sum()), np.append(hoped, TEXTS - hoped.sum())
    assert len(seen) > 30
    return float(chisquare(seen, hoped * seen.sum() / hoped.sum()).pvalue)


@pytest.mark.parametrize("has_prefix_processor", [False, True], ids=["plain", "penalty"])
@pytest.mark.parametrize("verification", ["coupled", "rejection"])
def test_texts_follow_the_exact_law(verification: str, has_prefix_processor: bool) -> None:
    planner = Shortening(seed=1, off=0.2, shorten=0.2)
    counts = sample_texts(verification, planner, has_prefix_processor)
    assert p_value(counts, exact_law(has_prefix_processor)) > 1e-3
    proposed, accepted = planner.totals()
    assert 0 < accepted < proposed


@pytest.mark.parametrize("verification", ["coupled", "rejection"])
def test_texts_of_a_sampling_draft_model_follow_the_exact_law(verification: str) -> None:
    counts, rate = drafted_by_model(verification)
    assert p_value(counts, exact_law(False)) > 1e-3
    assert 0 < rate < 1


class AllOrNothing(ForcedPlanner):
    """Drops a whole draft if the drafter is not sure of its second token."""

    def __init__(self, *, between_rounds: bool) -> None:
        super().__init__(arm="draft_model", num_draft_tokens=2)
        self.refines_between_rounds = between_rounds

    def refine(self, view: BatchView, plan: Plan, confidence: Confidence) -> Plan:
        pairs = zip(plan.choices, confidence, strict=True)
        return Plan(tuple(Choice.off() if min(c[1:], default=1) < 0.6 else p for p, c in pairs))


@pytest.mark.parametrize("between_rounds", [False, True])
@pytest.mark.parametrize("verification", ["coupled", "rejection"])
def test_dropping_drafts_for_what_followed_them_does_not_change_the_law(
    verification: str, between_rounds: bool
) -> None:
    """The confidence of a second token says something of the first, which was drawn."""
    counts = sample_texts(verification, AllOrNothing(between_rounds=between_rounds), False)
    assert p_value(counts, exact_law(False)) > 1e-3


@cache
def drafted_by_model(verification: str) -> tuple[Counter[tuple[int, ...]], float]:
    """Texts, and the acceptance rate."""
    planner = ForcedPlanner(arm="draft_model", num_draft_tokens=2)
    counts = sample_texts(verification, planner, False)
    proposed, accepted = planner.totals()
    return counts, accepted / proposed


def test_rejection_accepts_more_of_the_same_drafter() -> None:
    assert drafted_by_model("rejection")[1] > drafted_by_model("coupled")[1]


class AcceptsTooMuch(RejectionVerifier):
    """min(1, 2 p / q) in place of min(1, p / q)."""

    def _accepts(self, *, p: float, q: float, u: float) -> bool:
        return u * q < 2 * p


class AcceptsNeighbours(CoupledVerifier):
    """Takes the token beside the sample for the sample, at times."""

    def _accepts(self, walk: Walk, child: int, sample: int) -> bool:
        return walk.draft.tokens[child] in (sample, (sample + 1) % VOCAB)


@pytest.mark.parametrize("broken", [AcceptsTooMuch(), AcceptsNeighbours()], ids=["twice", "beside"])
def test_a_broken_acceptance_rule_is_found(broken: Verifier) -> None:
    planner = ForcedPlanner(arm="draft_model", num_draft_tokens=2)
    counts = sample_texts(broken, planner, False)
    assert p_value(counts, exact_law(False)) < 1e-9
