"""Many requests at once: the n-gram drafter against itself one by one, and against a scan."""

import gc
import subprocess
import sys
import weakref
from collections.abc import Sequence
from unittest import mock

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sdcontrol.compiled import array_at
from sdcontrol.core import Hint
from sdcontrol.engine.drafters import ngram
from sdcontrol.engine.drafters.base import Draft, DraftInFull, DraftRequest, DraftTask
from sdcontrol.engine.drafters.ngram import NgramDrafter
from sdcontrol.engine.drafters.ngram_index import NgramIndex, extend_all
from sdcontrol.engine.drafters.ngram_tree import _Tree, num_grown, tree_shape
from sdcontrol.errors import ConfigError, DrafterFault
from tests.ngram_twin import TwinIndex
from tests.test_ngram import FakeRequest, noisy_text

MANY = 2 * ngram._FEWEST_AT_ONCE


def proposed(
    drafter: NgramDrafter, requests: Sequence[DraftRequest], lengths: Sequence[int]
) -> Sequence[Draft]:
    tasks = [DraftTask(r, drafter.name, n) for r, n in zip(requests, lengths, strict=True)]
    return drafter.propose(tasks, DraftInFull(tasks))


def grow(request: FakeRequest, new: Sequence[int]) -> tuple[FakeRequest, int]:
    request.tokens.extend(new)
    return request, len(new)


def copied_texts(num_texts: int, num_tokens: int) -> list[list[int]]:
    """Texts of their own that repeat themselves."""
    rng = np.random.default_rng(num_texts)
    return [np.resize(rng.integers(0, 9, 23), num_tokens).tolist() for _ in range(num_texts)]


def told_together(max_branches: int) -> list[str]:
    """What a drafter says of texts that grow side by side."""
    drafter, text = NgramDrafter(max_branches=max_branches), noisy_text()
    requests = [FakeRequest(str(number), text[number : number + 30]) for number in range(MANY)]
    for request in requests:
        drafter.start(request)
    said = []
    for step in range(60):
        committed = []
        for number, request in enumerate(requests):
            first = number + len(request.tokens)
            committed.append(grow(request, text[first : first + (number + step) % 4]))
        drafter.commit_all(committed)
        said.append(f"{drafter.offers(requests)} {proposed(drafter, requests, [9] * MANY)}")
    return said


few_tokens = st.lists(st.integers(0, 2), max_size=6)
many_tokens = st.builds(lambda unit, size: (unit * size)[:size], few_tokens, st.integers(0, 150))


class Requests(RuleBasedStateMachine):
    """Requests come, grow together in any selection, lose their caches and end.

    `together` is told of all at once, `alone` one by one.
    """

    max_branches = 2

    def __init__(self) -> None:
        super().__init__()
        self.together = NgramDrafter(max_match=6, max_branches=self.max_branches)
        self.alone = NgramDrafter(max_match=6, max_branches=self.max_branches)
        self.requests: list[FakeRequest] = []
        self.twins: dict[str, TwinIndex] = {}
        self.num_started = 0

    @rule(prompts=st.lists(many_tokens, min_size=1, max_size=4))
    def start(self, prompts: list[list[int]]) -> None:
        for prompt in prompts:
            request = FakeRequest(f"r{self.num_started % 7}", list(prompt))  # ids come again
            self.num_started += 1
            if request.id in self.twins:
                continue
            self.together.start(request)
            self.alone.start(request)
            self.requests.append(request)
            self.twins[request.id] = TwinIndex(6, prompt)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        chosen = data.draw(st.permutations(self.requests))
        chosen = chosen[: data.draw(st.integers(0, len(chosen)))]
        committed = []
        for request in chosen:
            new = data.draw(st.one_of(few_tokens, many_tokens))
            committed.append(grow(request, new))
            self.alone.commit(request, len(new))
            self.twins[request.id].extend(new)
        with mock.patch.object(ngram, "_FEWEST_AT_ONCE", data.draw(st.integers(0, 4))):
            self.together.commit_all(committed)

    @precondition(lambda self: self.requests)
    @rule(number=st.integers(0, 30))
    def lose_cache(self, number: int) -> None:
        self.together.lose_cache(self.requests[number % len(self.requests)])

    @precondition(lambda self: self.requests)
    @rule(number=st.integers(0, 30))
    def finish(self, number: int) -> None:
        request = self.requests.pop(number % len(self.requests))
        self.together.finish(request)
        self.alone.finish(request)
        del self.twins[request.id]

    @invariant()
    def they_are_told_the_same(self) -> None:
        lengths = [(7 * number + self.num_started) % 35 for number in range(len(self.requests))]
        offers = self.together.offers(self.requests)
        assert offers == [{"ngram": self.alone.hint(r, "ngram")} for r in self.requests]
        drafts = proposed(self.together, self.requests, lengths)
        for request, draft, length in zip(self.requests, drafts, lengths, strict=True):
            assert [draft] == proposed(self.alone, [request], [length])

    @invariant()
    def they_know_what_the_twin_knows(self) -> None:
        most = self.together._most_occurrences
        assert self.together._tracked.keys() == self.twins.keys()
        for request_id, twin in self.twins.items():
            index = self.together._tracked[request_id].index
            assert index.match_tokens == twin.match_tokens
            assert index.occurrences == twin.occurrences(most)
            runs = twin.continuations(index.occurrences, 32)
            flat = index.continuations(32)
            assert [flat[number::most] for number in range(len(runs))] == runs


class RequestsOfBushyTrees(Requests):
    max_branches = 4


Requests.TestCase.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
RequestsOfBushyTrees.TestCase.settings = Requests.TestCase.settings
TestRequests = Requests.TestCase
TestRequestsOfBushyTrees = RequestsOfBushyTrees.TestCase


@pytest.mark.parametrize(
    ("max_branches", "without"),
    [
        (1, "import sys; sys.modules['numba'] = None"),
        (2, "import sys; sys.modules['numba'] = None"),
        (3, "import sys; sys.modules['numba'] = None"),
        (2, "import os; os.environ['NUMBA_DISABLE_JIT'] = '1'"),
    ],
)
def test_without_a_compiler_all_are_told_the_same(max_branches: int, without: str) -> None:
    program = (
        f"{without}\n"
        "from tests.test_ngram_batch import told_together\n"
        f"print(*told_together({max_branches}), sep='\\n')"
    )
    command = [sys.executable, "-c", program]
    plain = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert plain.splitlines() == told_together(max_branches)


def test_texts_that_outgrow_their_room_together_move_together() -> None:
    texts = copied_texts(5, 3000)
    indexes = [NgramIndex(16, text[:number]) for number, text in enumerate(texts)]
    for end in (10, 11, 24, 25, 26, 500, 3000):
        extend_all(indexes, [text[: end + number] for number, text in enumerate(texts)])
        for number, (index, text) in enumerate(zip(indexes, texts, strict=True)):
            fresh = NgramIndex(16, text[: end + number])
            assert len(index) == len(fresh)
            assert (index.found, index.occurrences) == (fresh.found, fresh.occurrences)


def test_all_together_may_be_none() -> None:
    extend_all([], [])
    drafter = NgramDrafter()
    drafter.commit_all([])
    assert list(drafter.offers([])) == list(proposed(drafter, [], [])) == []


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_token_that_is_none_is_refused_before_any_is_taken(token: int) -> None:
    indexes = [NgramIndex(4, [1, 2, 1]), NgramIndex(4, [5])]
    with pytest.raises(ConfigError, match="takes 0 to"):
        extend_all(indexes, [[1, 2, 1, 7], [5, token]])
    assert len(indexes[1]) == 1


def started_together(num_requests: int) -> tuple[NgramDrafter, list[FakeRequest]]:
    drafter = NgramDrafter()
    texts = copied_texts(num_requests, 40)
    requests = [FakeRequest(str(number), text) for number, text in enumerate(texts)]
    for request in requests:
        drafter.start(request)
    return drafter, requests


@pytest.mark.parametrize("num_requests", [2, MANY])
def test_a_lost_commit_is_noticed_among_many(num_requests: int) -> None:
    drafter, requests = started_together(num_requests)
    committed = [grow(request, [1, 2]) for request in requests]
    committed[-1] = requests[-1], 1
    with pytest.raises(DrafterFault, match="42 tokens, 41 were committed"):
        drafter.commit_all(committed)


@pytest.mark.parametrize("num_requests", [2, MANY])
def test_a_request_that_never_started_is_noticed_among_many(num_requests: int) -> None:
    drafter, requests = started_together(num_requests)
    drafter.finish(requests[-1])
    for ask in (
        lambda: drafter.commit_all([grow(request, [1]) for request in requests]),
        lambda: drafter.offers(requests),
        lambda: proposed(drafter, requests, [3] * num_requests),
    ):
        with pytest.raises(DrafterFault, match=f"'{requests[-1].id}' is unknown"):
            ask()


def test_a_request_that_ends_gives_its_memory_back() -> None:
    drafter, requests = started_together(MANY)
    drafter.commit_all([grow(request, [1, 2, 3] * 40) for request in requests])
    memories = [weakref.ref(drafter._tracked[r.id].index._memory) for r in requests]
    drafter.offers(requests)
    proposed(drafter, requests, [5] * MANY)
    drafter.finish(requests[0])
    gc.collect()
    assert [memory() is None for memory in memories] == [True, *[False] * (MANY - 1)]


def test_equal_look_ups_share_one_offer() -> None:
    drafter, requests = started_together(MANY)
    twice = FakeRequest("twice", list(requests[0].tokens))
    drafter.start(twice)
    first, second = drafter.offers([requests[0], twice])
    assert first is second or first == second
    drafter.commit_all([grow(request, request.tokens[-23:-21]) for request in [*requests, twice]])
    first, second = drafter.offers([requests[0], twice])
    assert first is second


def test_whoever_overrides_what_is_said_of_one_is_asked_it_of_all() -> None:
    class Tireless(NgramDrafter):
        told = 0

        def hint(self, request: DraftRequest, arm: str) -> Hint:
            return Hint()

        def commit(self, request: DraftRequest, num_new_tokens: int) -> None:
            self.told += num_new_tokens
            super().commit(request, num_new_tokens)

    class Both(Tireless):
        """Overrides nothing."""

    for kind in (Tireless, Both):
        drafter = kind()
        requests = [FakeRequest(str(n), text) for n, text in enumerate(copied_texts(MANY, 30))]
        for request in requests:
            drafter.start(request)
        drafter.commit_all([grow(request, [1, 2]) for request in requests])
        assert drafter.told == 2 * MANY
        assert list(drafter.offers(requests)) == [{"ngram": Hint()}] * MANY


@pytest.mark.parametrize("partings", [(), ((0, 0),), ((0, 3),), ((0, 32),), ((0, 2), (1, 5))])
@pytest.mark.parametrize("max_branches", [1, 2, 3])
def test_trees_that_are_cut_are_those_that_are_grown(
    partings: tuple[tuple[int, int], ...], max_branches: int
) -> None:
    """A tree is grown for more nodes than it is asked for, by runs that are known further."""
    for num_nodes in range(1, 33):
        known = tuple((run, min(far, num_grown(num_nodes))) for run, far in partings)
        shape = tree_shape(5, known, num_nodes, max_branches, 3)
        short = tuple((run, min(far, num_nodes)) for run, far in partings)
        nodes = _Tree(5, short, max_branches).grown(num_nodes)
        assert shape.parents == tuple(node.parent for node in nodes)
        assert shape.confidence == tuple(node.confidence for node in nodes)
        places = tuple(3 * node.depth + node.run for node in nodes)
        assert shape.take(range(96)) == places


def test_arrays_at_an_address_are_for_compiled_code() -> None:
    with pytest.raises(NotImplementedError, match="array itself"):
        array_at(0, 1)
