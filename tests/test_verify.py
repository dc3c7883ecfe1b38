"""Verification: the law of the text, what it depends on, and that broken rules are found out."""

from collections.abc import Callable, Sequence
from itertools import product
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest, chisquare
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from sdcontrol.engine import rejection
from sdcontrol.engine.coupled import Walk
from sdcontrol.engine.drafters.base import Draft
from sdcontrol.engine.sampling import Row, RowSampler, draft_sample
from sdcontrol.engine.verify import (
    CoupledVerifier,
    RejectionVerifier,
    SyntheticVerifier,
    Verdict,
    Verifier,
    VerifyTask,
    build_verifier,
)
from sdcontrol.errors import ConfigError, UnknownName, UnsupportedGeneration

FALSE_ALARM = 1e-4  # of each statistical test here, had its seed been drawn afresh
FOUND_OUT = 1e-9  # a broken rule must be at least this implausible

# A toy model: the logits after a token are a row of a table, so its law is known exactly.
Drafting = Callable[[Sequence[RowSampler], Sequence[list[int]]], list[Draft | None]]


def table(num_tokens: int, seed: int, spread: float = 1.0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn((num_tokens, num_tokens), generator=random) * spread


def packed(
    target: Tensor,
    samplers: Sequence[RowSampler],
    texts: Sequence[list[int]],
    drafts: Sequence[Draft | None],
) -> tuple[Tensor, list[VerifyTask]]:
    """The step's logits and tasks, as an engine would lay them out."""
    fed: list[int] = []
    tasks = []
    for sampler, text, draft in zip(samplers, texts, drafts, strict=True):
        tasks.append(VerifyTask(sampler, text, draft, len(fed), "toy"))
        fed += [text[-1], *(draft.tokens if draft else ())]
    return target[fed], tasks


def decode(
    verifier: Verifier,
    target: Tensor,
    samplers: Sequence[RowSampler],
    *,
    num_tokens: int,
    drafting: Drafting,
    prompt: Sequence[int] = (0,),
) -> tuple[list[list[int]], int]:
    """Every request's text of `num_tokens`, and how many draft tokens were accepted."""
    texts = [list(prompt) for _ in samplers]
    accepted = 0
    while any(len(text) < len(prompt) + num_tokens for text in texts):
        drafts = drafting(samplers, texts)
        logits, tasks = packed(target, samplers, texts, drafts)
        for text, draft, verdict in zip(texts, drafts, verifier.verify(logits, tasks), strict=True):
            path = [draft.tokens[node] for node in verdict.accepted_nodes] if draft else []
            text += [*path, verdict.next_token]
            accepted += len(path)
    return [text[len(prompt) :][:num_tokens] for text in texts], accepted


def no_drafts(samplers: Sequence[RowSampler], texts: Sequence[list[int]]) -> list[Draft | None]:
    return [None for _ in texts]


def sampled_chains(drafter: Tensor, verification: str, length: int = 3) -> Drafting:
    """A drafter that samples from its own table."""

    def drafting(samplers: Sequence[RowSampler], texts: Sequence[list[int]]) -> list[Draft | None]:
        rounds = []
        drafted: list[list[int]] = [[] for _ in texts]
        for _ in range(length):
            fed = [(text + own)[-1] for text, own in zip(texts, drafted, strict=True)]
            rows = [
                Row(sampler, text, tuple(own))
                for sampler, text, own in zip(samplers, texts, drafted, strict=True)
            ]
            rounds.append(draft_sample(drafter[fed], rows, verification=verification))
            for own, token in zip(drafted, rounds[-1].tokens, strict=True):
                own.append(token)
        return [
            Draft.chain(own, distribution=_stacked([r.distribution for r in rounds], index))
            for index, own in enumerate(drafted)
        ]

    return drafting


def _stacked(laws: Sequence[Tensor | None], index: int) -> Tensor | None:
    return (
        torch.stack([law[index] for law in laws if law is not None])
        if laws[0] is not None
        else None
    )


def certain_chains(
    samplers: Sequence[RowSampler], texts: Sequence[list[int]]
) -> list[Draft | None]:
    """A drafter without chance, like a look-up: the tokens follow from the text alone."""
    return [Draft.chain([(text[-1] + step) % 3 for step in range(1, 4)]) for text in texts]


def random_trees(seed: int, num_tokens: int, max_nodes: int = 6) -> Drafting:
    """Trees (often chains, or none) that have nothing to do with the noise."""
    random = Random(seed)

    def tree() -> Draft | None:
        count = random.randint(0, max_nodes)
        chain = random.random() < 0.3
        tokens = tuple(random.randrange(num_tokens) for _ in range(count))
        parents = tuple(i - 1 if chain else random.randint(-1, i - 1) for i in range(count))
        return Draft(tokens, parents) if count else None

    return lambda samplers, texts: [tree() for _ in texts]


# --- the law of the text ----------------------------------------------------------------------

NUM_TOKENS, LENGTH, NUM_TEXTS = 3, 3, 3_000
TARGET_TABLE = table(NUM_TOKENS, seed=1)
DRAFTER_TABLE = table(NUM_TOKENS, seed=2)


def plausibility(verifier: Verifier, drafting: Drafting, num_texts: int = NUM_TEXTS) -> float:
    """The p-value of `num_texts` texts of `LENGTH` under the target's exact joint law."""
    samplers = [RowSampler(do_sample=True, seed=seed) for seed in range(num_texts)]
    texts, accepted = decode(verifier, TARGET_TABLE, samplers, num_tokens=LENGTH, drafting=drafting)
    assert accepted > num_texts / 10, "hardly anything was accepted: no test"
    law = TARGET_TABLE.double().softmax(dim=-1)
    outcomes = list(product(range(NUM_TOKENS), repeat=LENGTH))
    expected = torch.ones(len(outcomes), dtype=torch.float64)
    for index, text in enumerate(outcomes):
        for before, token in zip((0, *text), text, strict=False):
            expected[index] *= law[before, token]
    counts = dict.fromkeys(outcomes, 0)
    for text in texts:
        counts[tuple(text)] += 1
    frequent = expected * num_texts >= 5  # rare texts are counted together
    observed = torch.tensor(list(counts.values()), dtype=torch.float64)
    pooled = [torch.cat((x[frequent], x[~frequent].sum()[None])) for x in (observed, expected)]
    if not pooled[1][-1] * num_texts >= 5:
        pooled = [x[:-1] for x in pooled]
    return float(chisquare(pooled[0], pooled[1] / pooled[1].sum() * pooled[0].sum()).pvalue)


LAWFUL = {
    "coupled, sampled chains": (CoupledVerifier(), sampled_chains(DRAFTER_TABLE, "coupled")),
    "coupled, certain chains": (CoupledVerifier(), certain_chains),
    "coupled, random trees": (CoupledVerifier(), random_trees(3, NUM_TOKENS)),
    "rejection, sampled chains": (RejectionVerifier(), sampled_chains(DRAFTER_TABLE, "rejection")),
    "rejection, certain chains": (RejectionVerifier(), certain_chains),
}


@pytest.mark.parametrize("case", LAWFUL)
def test_text_follows_the_targets_joint_law(case: str) -> None:
    """Chi-square over all texts of three tokens, false alarm at `FALSE_ALARM`."""
    assert plausibility(*LAWFUL[case]) > FALSE_ALARM


class BrokenRejection(RejectionVerifier):
    def __init__(self, rule: Callable[[float, float, float], bool]) -> None:
        self.rule = rule

    def _accepts(self, *, p: float, q: float, u: float) -> bool:
        return self.rule(p, q, u)


class BrokenCoupled(CoupledVerifier):
    def __init__(self, rule: Callable[[int, int], bool]) -> None:
        self.rule = rule

    def _accepts(self, walk: Walk, child: int, sample: int) -> bool:
        return self.rule(walk.draft.tokens[child], sample)


BROKEN = {
    "rejection accepts always": (BrokenRejection(lambda p, q, u: True), "sampled"),
    "rejection accepts by q / p": (BrokenRejection(lambda p, q, u: u * p < q), "sampled"),
    "rejection accepts by p": (BrokenRejection(lambda p, q, u: u < p), "sampled"),
    "rejection accepts half": (BrokenRejection(lambda p, q, u: u < 0.5), "sampled"),
    "rejection accepts always, certain": (BrokenRejection(lambda p, q, u: True), "certain"),
    "coupled accepts always": (BrokenCoupled(lambda token, sample: True), "certain"),
    "coupled accepts neighbours": (BrokenCoupled(lambda token, sample: token >= sample), "certain"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_acceptance_rule_is_found_out(case: str) -> None:
    verifier, kind = BROKEN[case]
    drafting = certain_chains if kind == "certain" else sampled_chains(DRAFTER_TABLE, "rejection")
    assert plausibility(verifier, drafting) < FOUND_OUT


def test_a_replacement_drawn_from_the_target_itself_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rejection, "_residual_scores", rejection._last_scores)
    drafting = sampled_chains(DRAFTER_TABLE, "rejection")
    assert plausibility(RejectionVerifier(), drafting) < FOUND_OUT


def test_the_unbroken_rule_passes_through_the_same_harness() -> None:
    verifier = BrokenRejection(lambda p, q, u: u * q < p)
    assert plausibility(verifier, sampled_chains(DRAFTER_TABLE, "rejection")) > FALSE_ALARM


# --- what the text depends on -----------------------------------------------------------------


def own_processors(seed: int) -> list[RowSampler]:
    """One request of every kind."""
    warpers = [hf.TemperatureLogitsWarper(0.8), hf.TopKLogitsWarper(5)]
    memory = [hf.RepetitionPenaltyLogitsProcessor(1.3), hf.NoRepeatNGramLogitsProcessor(3)]
    lists = [[], warpers, memory, [*memory, *warpers], [*warpers, *memory]]
    return [
        RowSampler(processors=LogitsProcessorList(processors), do_sample=do_sample, seed=seed)
        for processors in lists
        for do_sample in (False, True)
    ]


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**31), drafts=st.integers(0, 2**31), together=st.booleans())
def test_coupled_text_is_a_function_of_the_seed_alone(
    seed: int, drafts: int, together: bool
) -> None:
    """Whatever is drafted, chains or trees, and whoever else is in the batch."""
    target = table(8, seed=seed, spread=2.0)
    expected, _ = decode(
        CoupledVerifier(), target, own_processors(seed), num_tokens=12, drafting=no_drafts
    )
    drafting = random_trees(drafts, 8)
    if together:
        texts, _ = decode(
            CoupledVerifier(), target, own_processors(seed), num_tokens=12, drafting=drafting
        )
    else:
        samplers = own_processors(seed)
        alone = (
            decode(CoupledVerifier(), target, [s], num_tokens=12, drafting=drafting)[0]
            for s in samplers
        )
        texts = [text for texts in alone for text in texts]
    assert texts == expected


def test_random_trees_are_both_accepted_and_rejected() -> None:
    """So that the test above tests something."""
    target = table(8, seed=0, spread=2.0)
    samplers = [sampler for seed in range(20) for sampler in own_processors(seed)]
    drafting = random_trees(1, 8)
    _, accepted = decode(CoupledVerifier(), target, samplers, num_tokens=12, drafting=drafting)
    assert 0.05 < accepted / (12 * len(samplers)) < 0.6


def test_a_coupled_drafter_that_is_the_target_is_always_accepted() -> None:
    target = table(8, seed=0, spread=2.0)
    logits, tasks = packed(
        target,
        own_processors(3),
        texts := [[1, 2, 3]] * 10,
        sampled_chains(target, "coupled")(own_processors(3), texts),
    )
    for verdict in CoupledVerifier().verify(logits, tasks):
        assert verdict.accepted_nodes == (0, 1, 2)


def test_a_rejection_drafter_that_is_the_target_is_always_accepted() -> None:
    target = table(8, seed=0, spread=2.0)
    samplers = own_processors(3)
    drafting = sampled_chains(target, "rejection")
    logits, tasks = packed(target, samplers, texts := [[1, 2, 3]] * 10, drafting(samplers, texts))
    for verdict in RejectionVerifier().verify(logits, tasks):
        assert verdict.accepted_nodes == (0, 1, 2)


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_rejection_of_greedy_requests_is_exact(seed: int) -> None:
    target = table(8, seed=seed)
    greedy = [sampler for sampler in own_processors(seed) if not sampler.do_sample]
    expected, _ = decode(CoupledVerifier(), target, greedy, num_tokens=12, drafting=no_drafts)
    drafting = sampled_chains(table(8, seed=seed + 1), "rejection")
    texts, _ = decode(RejectionVerifier(), target, greedy, num_tokens=12, drafting=drafting)
    assert texts == expected


# --- paths, work and failures -----------------------------------------------------------------


def argmax_logits(*tokens: int, num_tokens: int = 10) -> Tensor:
    """Rows whose argmax are `tokens`."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), num_tokens).float()


def test_the_path_through_a_tree_is_that_of_the_targets_samples() -> None:
    #   root ─ 7 ─ 9 ─ 4        the target says: 3 after the root, 5 after 3, 6 after 5
    #      └── 3 ─ 8
    #          └── 5
    draft = Draft(tokens=(7, 9, 3, 4, 8, 5), parents=(-1, 0, -1, 1, 2, 2))
    logits = argmax_logits(0, 3, 1, 1, 5, 1, 1, 6)
    task = VerifyTask(RowSampler(), [1, 2], draft, first_row=1)
    verdict = CoupledVerifier().verify(logits, [task])
    assert verdict == [Verdict(accepted_nodes=(2, 5), next_token=6)]


def test_a_step_with_nothing_drafted_gives_the_next_tokens() -> None:
    tasks = [VerifyTask(RowSampler(), [1], draft, row) for row, draft in [(0, None), (1, Draft())]]
    verdicts = CoupledVerifier().verify(argmax_logits(4, 5), tasks)
    assert [verdict.next_token for verdict in verdicts] == [4, 5]
    assert CoupledVerifier().verify(argmax_logits(4), []) == []
    assert RejectionVerifier().verify(argmax_logits(4), []) == []


def test_greedy_and_sampled_requests_leave_the_device_in_one_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warpers = LogitsProcessorList([hf.TemperatureLogitsWarper(0.8), hf.TopKLogitsWarper(5)])
    samplers = [RowSampler(), RowSampler(processors=warpers, do_sample=True), RowSampler()]
    drafts: list[Draft | None] = [Draft.chain([1, 2, 3])] * 3
    logits, tasks = packed(table(8, seed=0), samplers, [[1]] * 3, drafts)
    copies = 0
    real = Tensor.tolist

    def counted(tensor: Tensor) -> object:
        nonlocal copies
        copies += tensor.device == logits.device and tensor.numel() >= len(logits) // 3
        return real(tensor)

    monkeypatch.setattr(Tensor, "tolist", counted)
    CoupledVerifier().verify(logits, tasks)
    assert copies == 1


def test_processors_of_one_row_are_not_called_beyond_the_first_rejection() -> None:
    seen: list[list[int]] = []

    def watching(input_ids: Tensor, scores: Tensor) -> Tensor:
        seen.append(input_ids[0].tolist())
        return scores

    sampler = RowSampler(processors=LogitsProcessorList([watching]), pad_tokens=[0])
    task = VerifyTask(sampler, [1, 2], Draft.chain([3, 4, 5, 6]), 0)
    logits = argmax_logits(3, 4, 9, 6, 7)
    assert CoupledVerifier().verify(logits, [task]) == [Verdict((0, 1), 9)]
    assert seen == [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]]


@pytest.mark.parametrize("verifier", [CoupledVerifier(), RejectionVerifier()])
def test_a_row_that_cannot_be_sampled_fails_only_where_it_is_reached(verifier: Verifier) -> None:
    logits = argmax_logits(3, 4, 5) * 1000
    logits[2] = torch.nan
    sampler = RowSampler(do_sample=True)
    off_path = VerifyTask(sampler, [1], Draft.chain([3, 9]), 0)
    assert verifier.verify(logits, [off_path]) == [Verdict((0,), 4)]
    on_path = VerifyTask(sampler, [1], Draft.chain([3, 4]), 0)
    with pytest.raises(UnsupportedGeneration, match="NaN or infinite"):
        verifier.verify(logits, [on_path])


def test_rejection_refuses_trees() -> None:
    task = VerifyTask(RowSampler(), [1], Draft((3, 4), (-1, -1)), 0, "ngram")
    assert not RejectionVerifier().supports_trees
    with pytest.raises(ConfigError, match="chains only"):
        RejectionVerifier().verify(argmax_logits(1, 2, 3), [task])


# --- synthetic acceptance ---------------------------------------------------------------------


@pytest.mark.parametrize("by_drafter", [True, False])
def test_synthetic_rates_are_reached(by_drafter: bool) -> None:
    """Binomial tests, false alarm at `FALSE_ALARM` each; the last rate holds beyond."""
    rates = (0.9, 0.5, 0.7)
    verifier = SyntheticVerifier({"toy": rates, "other": 0.0} if by_drafter else rates)
    samplers = [RowSampler(seed=seed) for seed in range(4_000)]
    drafts: list[Draft | None] = [Draft.chain([1, 2, 3, 4])] * len(samplers)
    logits, tasks = packed(table(5, seed=0), samplers, [[0]] * len(samplers), drafts)
    verdicts = verifier.verify(logits, tasks)
    lengths = [len(verdict.accepted_nodes) for verdict in verdicts]
    for depth, rate in enumerate((*rates, rates[-1])):
        reached = sum(length >= depth for length in lengths)
        passed = sum(length > depth for length in lengths)
        assert binomtest(passed, reached, rate).pvalue > FALSE_ALARM


def test_synthetic_text_ends_with_the_targets_own_sample() -> None:
    logits, tasks = packed(table(5, seed=0), [RowSampler()], [[0]], [Draft.chain([1, 2])])
    verdict = SyntheticVerifier(1.0).verify(logits, tasks)
    assert verdict == [Verdict((0, 1), int(logits[2].argmax()))]


@given(seed=st.integers(0, 9999), shares_luck=st.booleans())
def test_synthetic_acceptances_are_known_before_the_logits(seed: int, shares_luck: bool) -> None:
    """A node that the walk comes to is accepted exactly where `stands` says so."""
    rng = Random(seed)
    verifier = SyntheticVerifier((0.8, 0.4), shares_luck=shares_luck)
    drafts: list[Draft | None] = [None]
    for nodes in (rng.randrange(6), rng.randrange(1, 6)):
        parents = (
            range(-1, nodes - 1) if shares_luck else [rng.randrange(-1, i) for i in range(nodes)]
        )
        drafts.append(Draft(tuple(rng.randrange(3) for _ in parents), tuple(parents)))
    samplers = [RowSampler(seed=rng.randrange(1 << 62) - (1 << 61)) for _ in drafts]
    texts = [[0] * rng.randrange(1, 9) for _ in drafts]
    logits, tasks = packed(table(5, seed=0), samplers, texts, drafts)
    stands = iter(verifier.stands(tasks).tolist())
    for draft, verdict in zip(drafts, verifier.verify(logits, tasks), strict=True):
        path: list[int] = []
        for node, parent in enumerate(draft.parents if draft else ()):
            if next(stands) and parent == (path[-1] if path else -1):
                path.append(node)
        assert verdict.accepted_nodes == tuple(path)
    assert next(stands, None) is None


def test_luck_is_shared_by_whatever_token_stands_at_a_position() -> None:
    verifier = SyntheticVerifier(0.5, shares_luck=True)
    assert not verifier.supports_trees
    drafts: list[Draft | None] = [Draft.chain([token, 4 - token]) for token in range(4)]
    logits, tasks = packed(table(5, seed=0), [RowSampler(seed=3)] * 4, [[0]] * 4, drafts)
    assert len({verdict.accepted_nodes for verdict in verifier.verify(logits, tasks)}) == 1


def test_synthetic_rates_may_be_given_by_family() -> None:
    verifier = SyntheticVerifier({"sparse_kv": 1.0})
    task = VerifyTask(RowSampler(), [1], Draft.chain([3]), 0, "sparse_kv:512")
    assert verifier.verify(argmax_logits(1, 2), [task]) == [Verdict((0,), 2)]
    with pytest.raises(UnknownName, match=r"'ngram'.*sparse_kv"):
        verifier.verify(
            argmax_logits(1, 2), [VerifyTask(RowSampler(), [1], Draft.chain([3]), 0, "ngram")]
        )


def test_verifiers_are_built_by_name() -> None:
    assert isinstance(build_verifier("coupled"), CoupledVerifier)
    assert isinstance(build_verifier("rejection"), RejectionVerifier)
    for rates in ([0.5], np.array([0.5]), np.float32(0.5)):
        made = build_verifier("synthetic", rates=rates)
        assert isinstance(made, SyntheticVerifier)
        task = VerifyTask(RowSampler(), [0], Draft.chain([1]), 0, "toy")
        assert tuple(made.rates_of(task)) == (0.5,)
    with pytest.raises(UnknownName, match=r"coupled.*rejection.*synthetic"):
        build_verifier("magic")
    with pytest.raises(ConfigError, match="rates"):
        build_verifier("synthetic")
    with pytest.raises(ConfigError, match="takes the settings"):
        build_verifier("coupled", rates=0.5)
    for bad in (1.5, -0.1, float("nan"), []):
        with pytest.raises(ConfigError, match="acceptance rates"):
            SyntheticVerifier(bad)
