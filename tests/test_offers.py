"""What drafters offer: looked at, joined, and kept where it says that it never changes."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import pytest

from sdcontrol.core import Hint
from sdcontrol.engine.config import EngineConfig
from sdcontrol.engine.drafters import vetting
from sdcontrol.engine.drafters.base import Draft, Drafter, DraftRequest, DraftTask, KeepDrafting
from sdcontrol.engine.drafters.draft_model import DraftModelDrafter
from sdcontrol.engine.drafters.sparse_kv import SparseKVDrafter
from sdcontrol.engine.drafters.vetting import Offers
from sdcontrol.engine.loop import Engine
from sdcontrol.errors import DrafterFault
from tests.engine_support import RandomPlanner, random_prompt, run_checked, submit_all, tiny_model

REQUESTS: Sequence[DraftRequest] = [object(), object()]  # type: ignore[list-item]  # nobody looks


class Saying(Drafter):
    """Offers what it is told to."""

    def __init__(self, name: str, *answers: Mapping[str, Hint | None]) -> None:
        self.name = name
        self.answers = answers

    def offers(self, requests: Sequence[DraftRequest]) -> Sequence[Mapping[str, Hint | None]]:
        return self.answers

    def propose(self, tasks: Sequence[DraftTask], keep_drafting: KeepDrafting) -> Sequence[Draft]:
        raise NotImplementedError


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[Hint | None]:
    seen: list[Hint | None] = []
    check = vetting.check_hint

    def counting(hint: Hint | None) -> None:
        seen.append(hint)
        check(hint)

    monkeypatch.setattr(vetting, "check_hint", counting)
    return seen


def test_what_never_changes_is_looked_at_once(looked_at: list[Hint | None]) -> None:
    fixed, hint = MappingProxyType({"a": Hint(3)}), Hint(5)
    offers, drafter = Offers(), Saying("a", fixed, {"a": hint})
    first, again = offers.of(drafter, REQUESTS), offers.of(drafter, REQUESTS)
    assert first == again == [(("a",), {"a": Hint(3)}), (("a",), {"a": hint})]
    assert first[0] is again[0]
    assert len(looked_at) == 3


def test_a_plain_answer_may_change_from_step_to_step() -> None:
    answer: dict[str, Hint | None] = {"a": Hint(3)}
    offers, drafter = Offers(), Saying("a", answer, answer)
    first = offers.of(drafter, REQUESTS)
    assert first[0] is first[1]
    answer["a"] = None
    assert offers.of(drafter, REQUESTS) == [(("a",), {})] * 2


def test_one_answer_of_two_drafters_is_looked_at_for_each() -> None:
    fixed = MappingProxyType({"a": None})
    offers = Offers()
    assert offers.of(Saying("a", fixed, fixed), REQUESTS) == [(("a",), {})] * 2
    with pytest.raises(DrafterFault, match="'a' is none of the arms"):
        offers.of(Saying("b", fixed, fixed), REQUESTS)


def test_a_fixed_answer_that_cannot_be_true_is_refused_each_time() -> None:
    drafter = Saying("a", *[MappingProxyType({"a": Hint(-1)})] * 2)
    offers = Offers()
    for _ in range(2):
        with pytest.raises(DrafterFault, match="counts of tokens are at least 0"):
            offers.of(drafter, REQUESTS)
    with pytest.raises(DrafterFault, match="1 offers, 2 requests"):
        offers.of(Saying("a", {}), REQUESTS)


def test_joined_offers_of_the_same_two_are_one_object() -> None:
    offers = Offers()
    one = offers.of(Saying("a", *[MappingProxyType({"a": Hint(3)})] * 2), REQUESTS)
    other = offers.of(Saying("b", *[MappingProxyType({"b": None})] * 2), REQUESTS)
    joined = [offers.join(*pair) for pair in zip(one, other, strict=True)]
    assert joined[0] is joined[1]
    assert joined[0] == (("a", "b"), {"a": Hint(3)})


def test_what_may_change_is_joined_anew() -> None:
    offers, fixed = Offers(), MappingProxyType({"a": Hint(3)})
    one = offers.of(Saying("a", fixed, fixed), REQUESTS)
    other = offers.of(Saying("b", {"b": None}, {"b": None}), REQUESTS)
    kept = len(offers._kept)
    assert offers.join(one[0], other[0]) == (("a", "b"), {"a": Hint(3)})
    assert offers.join(one[0], other[0]) is not offers.join(one[0], other[0])
    assert len(offers._kept) == kept


def test_no_more_offers_are_kept_than_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vetting, "_MOST_KEPT", 10)
    offers, drafter = Offers(), Saying("a")
    for most in range(100):
        drafter.answers = (MappingProxyType({"a": Hint(most)}),) * 2
        assert offers.of(drafter, REQUESTS) == [(("a",), {"a": Hint(most)})] * 2
    assert len(offers._kept) <= 10


@pytest.mark.parametrize("kind", [DraftModelDrafter, SparseKVDrafter])
def test_what_our_drafters_say_of_many_is_what_they_say_of_each(
    kind: type[Drafter], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, draft_model = tiny_model("Llama", seed=31), tiny_model("Llama", seed=32)
    compared = 0
    offers = kind.offers

    def comparing(
        drafter: Drafter, requests: Sequence[DraftRequest]
    ) -> Sequence[Mapping[str, Hint | None]]:
        nonlocal compared
        told = offers(drafter, requests)
        assert [dict(each) for each in told] == Drafter.offers(drafter, requests)
        compared += len(requests)
        return told

    monkeypatch.setattr(kind, "offers", comparing)
    config = EngineConfig(kv_tokens=2048, max_batch_size=3, max_prefill_tokens=40)
    drafters = (draft_model, "sparse_kv:48")
    with Engine(model, drafters=drafters, planner=RandomPlanner(4), config=config) as engine:
        prompts = [random_prompt(length, seed=length) for length in (5, 60, 33, 40)]
        submit_all(engine, prompts, max_new_tokens=24)
        run_checked(engine)
        assert engine.drafting.quarantined == {}
    assert compared > 60
