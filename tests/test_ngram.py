"""The n-gram drafter against a scan of the text."""

import subprocess
import sys
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from sdcontrol.engine.drafters import ngram, ngram_index, ngram_trie
from sdcontrol.engine.drafters.base import ROOT, Draft, DraftTask
from sdcontrol.engine.drafters.ngram import MAX_DRAFT_TOKENS, NgramDrafter, matched_lengths
from sdcontrol.engine.drafters.ngram_index import NgramIndex
from sdcontrol.errors import ConfigError, DrafterFault
from tests.ngram_twin import TwinIndex


@dataclass
class FakeRequest:
    id: str = "r"
    tokens: list[int] = field(default_factory=list)


def longest_match(text: list[int], max_match: int) -> tuple[int, int | None]:
    """Length of the longest suffix that stands earlier, and where it ended last: by scanning."""
    for length in range(min(max_match, len(text) - 1), 0, -1):
        for end in range(len(text) - 2, length - 2, -1):
            if text[end - length + 1 : end + 1] == text[len(text) - length :]:
                return length, end
    return 0, None


def expected_chain(text: list[int], max_match: int, min_match: int, num_tokens: int) -> list[int]:
    """What follows that occurrence, token by token, into the draft itself."""
    length, end = longest_match(text, max_match)
    if end is None or length < min_match:
        return []
    grown = list(text)
    for step in range(num_tokens):
        grown.append(grown[end + 1 + step])
    return grown[len(text) :]


def started(
    tokens: list[int], *, max_match: int = 16, min_match: int = 1, max_branches: int = 3
) -> tuple[NgramDrafter, FakeRequest]:
    drafter = NgramDrafter(max_match=max_match, min_match=min_match, max_branches=max_branches)
    request = FakeRequest(tokens=list(tokens))
    drafter.start(request)
    return drafter, request


def draft(drafter: NgramDrafter, request: FakeRequest, num_draft_tokens: int) -> Draft:
    task = DraftTask(request, drafter.name, num_draft_tokens)
    (proposed,) = drafter.propose([task], lambda drafts: [len(d.tokens) for d in drafts])
    return proposed


def paths(proposed: Draft) -> list[tuple[int, ...]]:
    """By node: the tokens from the root down to it."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(proposed.tokens, proposed.parents, strict=True):
        found.append((() if parent == ROOT else found[parent]) + (token,))
    return found


def survivals(proposed: Draft) -> list[float]:
    """By node: the product of confidence from the root down to it."""
    found: list[float] = []
    for parent, confidence in zip(proposed.parents, proposed.confidence, strict=True):
        found.append((1.0 if parent == ROOT else found[parent]) * confidence)
    return found


def nodes_of(index: NgramIndex) -> NDArray[np.uint32]:
    """Its nodes, by slot."""
    table = np.asarray(index._numbers)[index._numbers[ngram_trie.TABLE] :]
    slots: NDArray[np.uint32] = table.reshape(-1, ngram_trie.WIDTH)
    return slots[slots[:, ngram_trie.LENGTH] > 0]


def shared(run: list[int], other: list[int]) -> int:
    """Leading tokens that two runs of one length have in common."""
    agree = [a == b for a, b in zip(run, other, strict=True)]
    return agree.index(False) if False in agree else len(agree)


def told(drafter: NgramDrafter, text: list[int]) -> list[str]:
    """What a drafter says of a text that grows by one to three tokens."""
    request, said = FakeRequest(tokens=text[:40]), []
    drafter.start(request)
    while len(request.tokens) < len(text):
        num_tokens = len(request.tokens)
        request.tokens.extend(text[num_tokens : num_tokens + 1 + num_tokens % 3])
        drafter.commit(request, len(request.tokens) - num_tokens)
        said.append(f"{drafter.hint(request, 'ngram')} {draft(drafter, request, 9)}")
    return [*said, str(matched_lengths(text, 10, 8).tolist())]


def noisy_text() -> list[int]:
    """Copies of one stretch, some tokens of which were changed; up to the largest token."""
    rng = np.random.default_rng(3)
    text = np.tile(rng.integers(2**32 - 30, 2**32, 60), 10)
    text[rng.random(600) < 0.1] = 2**32 - 1
    return text.tolist()


alphabets = st.integers(1, 5)
largest_tokens = st.sampled_from([0, 1, 2**31, 2**32 - 2, 2**32 - 1])
texts = alphabets.flatmap(lambda size: st.lists(st.integers(0, size - 1), min_size=1, max_size=60))
max_matches = st.integers(1, 9)


@given(texts, max_matches, st.data())
@settings(max_examples=300, deadline=None)
def test_the_index_finds_what_a_scan_finds_however_the_text_came(
    text: list[int], max_match: int, data: st.DataObject
) -> None:
    index, done = NgramIndex(max_match), 0
    while done < len(text):
        num_new = data.draw(st.integers(1, len(text) - done))
        index.extend(text[done : done + num_new])
        done += num_new
        length, end = longest_match(text[:done], max_match)
        assert index.match_tokens == length
        assert index.occurrences[:1] == (() if end is None else (end,))
    assert len(index) == len(text)


@given(texts, max_matches)
@settings(max_examples=200, deadline=None)
def test_every_further_occurrence_is_an_earlier_place_of_the_same_match(
    text: list[int], max_match: int
) -> None:
    index = NgramIndex(max_match, text, most=5)
    found, length = index.occurrences, index.match_tokens
    assert list(found) == sorted(set(found), reverse=True)
    for end in found:
        assert text[end - length + 1 : end + 1] == text[len(text) - length :]
    ends = [
        end
        for end in range(length - 1, len(text) - 1)
        if length and text[end - length + 1 : end + 1] == text[len(text) - length :]
    ]
    assert len(found) >= min(len(ends), 2)


@given(
    st.lists(st.one_of(st.integers(0, 2), largest_tokens), min_size=1, max_size=250),
    st.one_of(max_matches, st.just(10**12)),
    st.integers(1, 5),
    st.lists(st.integers(1, 90), max_size=20),
)
@settings(max_examples=300, deadline=None)
def test_the_index_says_what_its_twin_says(
    text: list[int], max_match: int, most: int, cuts: list[int]
) -> None:
    """Over several moves to more room, and whichever way the tokens come."""
    index, twin, done = NgramIndex(max_match, most=most), TwinIndex(min(max_match, 250)), 0
    for number, num_new in enumerate([*cuts, len(text)]):
        new = text[done : done + num_new]
        done += len(new)
        index.extend(new) if number % 2 else index.extend_to(text[:done])
        twin.extend(new)
        occurrences = twin.occurrences(most)
        assert index.match_tokens == twin.match_tokens
        assert index.occurrences == occurrences
        runs, flat = twin.continuations(occurrences, 32), index.continuations(32)
        assert [flat[number::most] for number in range(len(runs))] == runs
        for other, (beside, far) in enumerate(index.partings(7), start=1):
            known = [shared(runs[other], run) for run in runs[:other]]
            assert known[beside] == max(known)
            assert far == min(max(known), 7)
        _, num_occurrences, num_alike, num_shared = index.found
        assert num_occurrences == len(runs)
        assert num_alike == sum(run[0] == runs[0][0] for run in runs[1:])
        assert num_shared == (shared(runs[0], runs[1]) if len(runs) > 1 else 0)


@pytest.mark.parametrize("max_branches", [1, 2, 3])
def test_without_numba_the_drafts_are_the_same(max_branches: int) -> None:
    program = (
        "import sys; sys.modules['numba'] = None\n"
        "from tests.test_ngram import NgramDrafter, noisy_text, told\n"
        f"print(*told(NgramDrafter(max_branches={max_branches}), noisy_text()), sep='\\n')"
    )
    command = [sys.executable, "-c", program]
    plain = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert plain.splitlines() == told(NgramDrafter(max_branches=max_branches), noisy_text())


@given(texts, max_matches, st.data())
@settings(max_examples=200, deadline=None)
def test_chains_are_the_continuation_of_the_latest_longest_match(
    text: list[int], max_match: int, data: st.DataObject
) -> None:
    min_match = data.draw(st.integers(1, max_match))
    num_tokens = data.draw(st.integers(0, MAX_DRAFT_TOKENS))
    drafter, request = started(text, max_match=max_match, min_match=min_match, max_branches=1)
    proposed = draft(drafter, request, num_tokens)
    assert list(proposed.tokens) == expected_chain(text, max_match, min_match, num_tokens)
    assert proposed.is_chain


@given(texts, max_matches, st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_drafts_are_trees_whose_every_prefix_is_the_likeliest(
    text: list[int], max_match: int, max_branches: int
) -> None:
    drafter, request = started(text, max_match=max_match, max_branches=max_branches)
    proposed = draft(drafter, request, MAX_DRAFT_TOKENS)
    num_nodes = len(proposed.tokens)
    assert len(proposed.parents) == len(proposed.confidence) == num_nodes
    assert all(ROOT <= parent < node for node, parent in enumerate(proposed.parents))
    assert len(set(paths(proposed))) == num_nodes, "siblings are distinct tokens"
    assert max(map(proposed.parents.count, proposed.parents), default=0) <= max_branches
    assert all(0 < confidence < 1 for confidence in proposed.confidence)
    assert survivals(proposed) == sorted(survivals(proposed), reverse=True)
    for size in range(num_nodes + 1):
        assert draft(drafter, request, size) == proposed.truncated(size)


@given(texts, max_matches)
@settings(max_examples=200, deadline=None)
def test_every_path_of_a_tree_follows_an_earlier_occurrence_of_the_match(
    text: list[int], max_match: int
) -> None:
    drafter, request = started(text, max_match=max_match, max_branches=3)
    length, _ = longest_match(text, max_match)
    suffix = text[len(text) - length :]
    ends = [e for e in range(length - 1, len(text) - 1) if text[e - length + 1 : e + 1] == suffix]
    continuations = []
    for end in ends:
        period = text[end + 1 :]
        continuations.append((period * MAX_DRAFT_TOKENS)[:MAX_DRAFT_TOKENS])
    for path in paths(draft(drafter, request, 12)):
        assert any(tuple(way[: len(path)]) == path for way in continuations)


@given(texts, max_matches, st.integers(1, 4), st.integers(1, 40), st.data())
@settings(max_examples=200, deadline=None)
def test_the_hint_is_what_the_draft_delivers(
    text: list[int], max_match: int, max_branches: int, asked: int, data: st.DataObject
) -> None:
    min_match = data.draw(st.integers(1, max_match))
    drafter, request = started(
        text, max_match=max_match, min_match=min_match, max_branches=max_branches
    )
    hint = drafter.hint(request, "ngram")
    proposed = draft(drafter, request, asked)
    assert hint.max_draft_tokens is not None
    assert len(proposed.tokens) == min(asked, hint.max_draft_tokens)
    length, _ = longest_match(text, max_match)
    assert hint.match_tokens == (length if length >= min_match else 0)
    assert hint.confidence == (proposed.confidence[0] if proposed.tokens else 0.0)


@given(texts, st.lists(texts, min_size=1, max_size=5), st.integers(1, 3))
@settings(max_examples=100, deadline=None)
def test_committing_in_steps_drafts_as_if_all_had_been_prompt(
    prompt: list[int], outputs: list[list[int]], max_branches: int
) -> None:
    drafter, request = started(prompt, max_branches=max_branches)
    for output in outputs:
        drafter.hint(request, "ngram")
        request.tokens.extend(output)
        drafter.commit(request, len(output))
        fresh, copy = started(request.tokens, max_branches=max_branches)
        assert drafter.hint(request, "ngram") == fresh.hint(copy, "ngram")
        assert draft(drafter, request, 8) == draft(fresh, copy, 8)


@given(texts, st.integers(0, 60), st.integers(0, 40), max_matches, st.data())
@settings(max_examples=150, deadline=None)
def test_matched_lengths_are_what_greedy_verification_would_accept(
    text: list[int], cut: int, max_draft: int, max_match: int, data: st.DataObject
) -> None:
    min_match = data.draw(st.integers(1, max_match))
    prompt_length = min(cut, len(text))
    lengths = matched_lengths(
        text, prompt_length, max_draft, max_match=max_match, min_match=min_match
    )
    assert lengths.dtype == np.int64
    for position, accepted in enumerate(lengths, start=prompt_length):
        asked = min(max_draft, MAX_DRAFT_TOKENS)
        chain = expected_chain(text[:position], max_match, min_match, asked)
        rest = text[position:]
        agree = [a == b for a, b in zip(chain, rest, strict=False)]
        assert accepted == (agree.index(False) if False in agree else len(agree))
    assert len(lengths) == len(text) - prompt_length


def test_a_loop_is_drafted_round_and_round() -> None:
    drafter, request = started([9, 1, 2, 1, 2], max_branches=1)
    assert draft(drafter, request, 7).tokens == (1, 2, 1, 2, 1, 2, 1)


def test_occurrences_that_went_on_differently_make_branches() -> None:
    drafter, request = started([5, 1, 8, 5, 2, 9, 5], max_branches=2)
    proposed = draft(drafter, request, 16)
    roots = [t for t, p in zip(proposed.tokens, proposed.parents, strict=True) if p == ROOT]
    assert roots == [2, 1]


def test_confidence_grows_with_the_match_and_with_agreement() -> None:
    def confidence(text: list[int]) -> float:
        drafter, request = started(text)
        return drafter.hint(request, "ngram").confidence or 0.0

    assert confidence([1, 2, 3]) == 0.0
    assert 0 < confidence([2, 9, 0, 2]) < confidence([1, 2, 9, 0, 1, 2])
    contradicted, alone, confirmed = ([2, 8, 7, 2, 9, 0, 2], [2, 9, 0, 2], [2, 9, 7, 2, 9, 0, 2])
    assert confidence(contradicted) < confidence(alone) < confidence(confirmed)


def test_a_text_without_repetition_offers_nothing() -> None:
    drafter, request = started(list(range(50)))
    assert drafter.hint(request, "ngram").max_draft_tokens == 0
    assert draft(drafter, request, 4) == Draft()


def test_an_empty_prompt_can_be_started_and_grows() -> None:
    drafter, request = started([])
    assert draft(drafter, request, 4) == Draft()
    request.tokens.extend([3, 3])
    drafter.commit(request, 2)
    assert draft(drafter, request, 3).tokens == (3, 3, 3)


def test_the_largest_token_ids_are_told_apart() -> None:
    largest = 2**32 - 1
    drafter, request = started([largest, 0, largest - 1, 0, largest], max_branches=1)
    assert draft(drafter, request, 2).tokens == (0, largest - 1)


@pytest.mark.parametrize("token", [-1, 2**32])
def test_tokens_that_are_none_are_refused(token: int) -> None:
    with pytest.raises(ConfigError, match="takes 0 to"):
        NgramIndex(4, [1, token])
    index = NgramIndex(4, [1, 2, 1])
    for add in (lambda: index.extend([token]), lambda: index.extend_to([1, 2, 1, token])):
        with pytest.raises(ConfigError, match="takes 0 to"):
            add()
    assert (len(index), index.match_tokens) == (3, 1)


def test_more_tokens_than_can_be_numbered_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram_index, "_MOST_TOKENS", 50)
    index = NgramIndex(4, [7] * 50)
    while len(index) < index._capacity:
        index.extend([7])
    with pytest.raises(ConfigError, match="holds 50 at most"):
        index.extend([7])
    with pytest.raises(ConfigError, match="holds 50 at most"):
        NgramIndex(4, [7] * 51)


def test_matches_are_kept_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "_MOST_MATCHES", 3)
    drafter, _ = started([])
    assert len(told(drafter, noisy_text())) > 200
    assert len(drafter._matches) <= 3


def test_requests_do_not_see_each_other() -> None:
    drafter, first = started([1, 2, 1])
    second = FakeRequest("other", [1, 7, 1])
    drafter.start(second)
    assert draft(drafter, first, 1).tokens == (2,)
    assert draft(drafter, second, 1).tokens == (7,)


def test_a_finished_request_is_forgotten_and_leaves_the_others() -> None:
    drafter, first = started([1, 2, 1])
    second = FakeRequest("other", [1, 7, 1])
    drafter.start(second)
    drafter.finish(first)
    with pytest.raises(DrafterFault, match="unknown"):
        drafter.hint(first, "ngram")
    assert draft(drafter, second, 1).tokens == (7,)
    drafter.finish(second)
    assert not drafter._tracked


def test_a_lost_commit_is_noticed() -> None:
    drafter, request = started([1, 2, 1])
    request.tokens.extend([2, 1])
    with pytest.raises(DrafterFault, match="5 tokens, 4 were committed"):
        drafter.commit(request, 1)


@pytest.mark.parametrize(
    ("max_match", "min_match", "max_branches"), [(0, 1, 1), (4, 0, 1), (2, 3, 1), (4, 1, 0)]
)
def test_settings_that_contradict_each_other_are_refused(
    max_match: int, min_match: int, max_branches: int
) -> None:
    with pytest.raises(ConfigError):
        NgramDrafter(max_match=max_match, min_match=min_match, max_branches=max_branches)


@pytest.mark.parametrize(("prompt_length", "max_draft"), [(-1, 4), (4, 4), (1, -1)])
def test_impossible_recordings_are_refused(prompt_length: int, max_draft: int) -> None:
    with pytest.raises(ConfigError):
        matched_lengths([1, 2, 3], prompt_length, max_draft)


def test_nodes_of_the_index_stay_within_two_for_each_token() -> None:
    rng = np.random.default_rng(0)
    unit = rng.integers(0, 50, 200).tolist()
    for text in (unit * 20, rng.integers(0, 3, 4000).tolist(), [7] * 4000):
        index = NgramIndex(16, text)
        num_nodes = len(nodes_of(index))
        assert 0 < num_nodes <= 2 * len(text)
        assert num_nodes <= 0.75 * index._memory[ngram_trie.SLOTS]


def test_drafting_needs_no_torch() -> None:
    program = "import sys, sdcontrol.engine.drafters.ngram; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
