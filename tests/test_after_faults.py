"""After something went wrong amid a step: whoever is left gets the text that it would have got anyway."""

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sdcontrol import SpeculativeDecoder
from sdcontrol.core import Planner
from sdcontrol.engine.config import EngineConfig
from sdcontrol.engine.drafters.ngram import NgramDrafter
from sdcontrol.engine.generation import decoding_of, prepare_config
from sdcontrol.engine.intake import Intake
from sdcontrol.engine.loop import Engine
from sdcontrol.engine.request import Request
from sdcontrol.errors import EngineClosed
from sdcontrol.traces.reader import Trace
from tests.engine_support import (
    PROMPTS,
    ROOMY,
    VOCAB,
    LatePlanner,
    RandomPlanner,
    generate_alone,
    noised,
    submit_all,
    tiny_model,
)

NEW = 16
GREEDY: Mapping[str, object] = {"max_new_tokens": NEW, "do_sample": False}
MOST_STEPS = 400
MODEL = tiny_model()
DRAFT = noised(MODEL)

Texts = dict[str, list[int]]


class Broken(Exception):
    """What a user's own code raises."""


def engine_of(planner: Planner | None = None, *, overlap: bool = False) -> Engine:
    return Engine(
        MODEL,
        drafters=["ngram", "sparse_kv:32:scored", DRAFT],
        planner=planner or LatePlanner(seed=2),
        config=EngineConfig(**ROOMY, overlap=overlap),
    )


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """What each prompt is continued with."""
    with Engine(MODEL, config=EngineConfig(**ROOMY)) as engine:
        names = submit_all(engine, PROMPTS, max_new_tokens=NEW)
        finished = engine.run()
        return [finished[name].output for name in names]


def step_on(engine: Engine, texts: Texts, *raised: type[BaseException]) -> int:
    """Step to the end; how often a step raised one of those."""
    failures = 0
    for _ in range(MOST_STEPS):
        if not engine.has_work:
            break
        try:
            engine.step()
        except raised:
            failures += 1
        for event in engine.take_events():
            texts.setdefault(event.request_id, []).extend(event.tokens)
    assert not engine.has_work
    engine.scheduler.check_integrity()
    assert engine.pool.free_blocks == engine.pool.num_blocks - 1
    return failures


# ---- errors of a user's own code


def submit_with_criterion(engine: Engine, criterion: Callable[..., Tensor]) -> str:
    config = prepare_config(MODEL, None, len(PROMPTS[1]), GREEDY)
    decoding = decoding_of(MODEL, config, PROMPTS[1], criteria=[criterion])
    return engine.enqueue(PROMPTS[1], decoding)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_stopping_criterion_that_raises_changes_no_other_text(
    alone: list[list[int]], *, overlap: bool
) -> None:
    calls = 0

    def raising(ids: Tensor, scores: Tensor | None) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise Broken
        return torch.tensor([False])

    with engine_of(overlap=overlap) as engine:
        first = submit_all(engine, PROMPTS[:1], max_new_tokens=NEW)[0]
        guilty = submit_with_criterion(engine, raising)
        last = submit_all(engine, PROMPTS[2:3], max_new_tokens=NEW)[0]
        texts: Texts = {}
        assert step_on(engine, texts, Broken) == 1
        assert [texts[name] for name in (first, guilty, last)] == alone[:3]


def test_a_processor_that_raises_is_no_fault_of_a_drafter() -> None:
    """It was called for a draft first; the step fails as a whole, and nobody is put under quarantine."""
    planner = RandomPlanner(seed=1, off=0.0)
    calls = 0

    def raising(ids: Tensor, scores: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls > 6:
            raise Broken
        return scores

    with Engine(MODEL, drafters=[DRAFT], planner=planner, config=EngineConfig(**ROOMY)) as engine:
        guilty = engine.submit(PROMPTS[0], processors=[raising], **GREEDY)  # type: ignore[arg-type]
        with pytest.raises(Broken):
            engine.run()
        engine.cancel(guilty)
        engine.run()
        assert engine.drafting.quarantined == {}
        assert engine.stats.faults == []
        submit_all(engine, PROMPTS, max_new_tokens=NEW)
        before = engine.stats.drafters["draft_model"].accepted
        engine.run()
        assert engine.stats.drafters["draft_model"].accepted > before


def test_a_drafter_that_raises_beside_a_step_that_fails_is_found_out_later() -> None:
    """The quarantine is lifted with the step; it comes again with one that does not fail."""
    drafter = NgramDrafter()
    planner = RandomPlanner(seed=1, off=0.0)
    with Engine(MODEL, drafters=[drafter], planner=planner, config=EngineConfig(**ROOMY)) as engine:
        submit_all(engine, PROMPTS[1:2], max_new_tokens=NEW)
        engine.step()
        setattr(drafter, "propose", broken)  # noqa: B010  (mypy would refuse it)
        hook = MODEL.register_forward_pre_hook(broken)
        with pytest.raises(Broken):
            engine.step()
        hook.remove()
        engine.run()
        assert list(engine.drafting.quarantined) == ["ngram"]
        assert len(engine.stats.faults) == 1


def broken(*_: object) -> None:
    raise Broken


# ---- numbers that are none


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("architecture", "last"), [("Llama", VOCAB - 1), ("Mistral", 5)])
def test_keys_that_are_not_finite_stay_with_their_own_request(
    architecture: str, last: int, *, overlap: bool
) -> None:
    """As those of a prompt that overflows in float16: others get the blocks that it leaves.

    Where windows are short, its own last tokens, and scores, may be as they should.
    """
    model, broken_token = tiny_model(architecture), VOCAB - 1
    with torch.no_grad():
        model.get_input_embeddings().weight[broken_token] = torch.nan
    prompts = [[token % broken_token for token in prompt] for prompt in PROMPTS]
    config = EngineConfig(**ROOMY, overlap=overlap)
    drafters = ["ngram", "sparse_kv:32:scored", noised(model)]
    expected = [generate_alone(model, prompt, **GREEDY).tokens for prompt in prompts]
    with Engine(model, drafters=drafters, planner=LatePlanner(seed=2), config=config) as engine:
        submit_all(engine, [[broken_token] * 200 + [last] * 200], max_new_tokens=NEW)
        engine.run()
        engine.take_events()
        names = submit_all(engine, prompts, max_new_tokens=NEW)
        texts: Texts = {}
        assert step_on(engine, texts) == 0
        assert [texts[name] for name in names] == expected
        assert engine.drafting.quarantined == {}


# ---- interrupts


class Interrupting(LatePlanner):
    """Is told of tokens, and somebody presses Ctrl-C the `at`-th time."""

    def __init__(self, at: int) -> None:
        super().__init__(seed=3)
        self._left = at

    def request_arrived(self, request_id: str, **_: object) -> None:
        """It is of no interest."""

    def tokens_emitted(self, request_id: str, tokens: Sequence[int], reason: str | None) -> None:
        self._left -= 1
        if not self._left:
            raise KeyboardInterrupt


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("at", [1, 2, 6, 7, 8])
def test_tokens_are_told_once_where_a_step_ends_between_two_requests(
    alone: list[list[int]], at: int, *, overlap: bool
) -> None:
    with engine_of(Interrupting(at), overlap=overlap) as engine:
        names = submit_all(engine, PROMPTS[:3], max_new_tokens=NEW)
        texts: Texts = {}
        assert step_on(engine, texts, KeyboardInterrupt) == 1
        assert [texts[name] for name in names] == alone[:3]


class Interrupted(NgramDrafter):
    """Somebody presses Ctrl-C while it is first told of a request's `event`."""

    def __init__(self, event: str) -> None:
        super().__init__()
        self._event = event

    def start(self, request: object) -> None:
        self._interrupt("start")
        super().start(request)  # type: ignore[arg-type]

    def finish(self, request: object) -> None:
        self._interrupt("finish")
        del self._tracked[request.id]  # type: ignore[attr-defined]  # raises where it is unknown
        super().finish(request)  # type: ignore[arg-type]

    def _interrupt(self, event: str) -> None:
        if event == self._event:
            self._event = ""
            raise KeyboardInterrupt


def test_requests_that_had_just_arrived_are_not_lost(alone: list[list[int]]) -> None:
    drafter, planner = Interrupted("start"), RandomPlanner(seed=1)
    with Engine(MODEL, drafters=[drafter], planner=planner, config=EngineConfig(**ROOMY)) as engine:
        names = submit_all(engine, PROMPTS[:3], max_new_tokens=NEW)
        texts: Texts = {}
        assert step_on(engine, texts, KeyboardInterrupt) == 1
        assert [texts[name] for name in names] == alone[:3]
        assert engine.drafting.quarantined == {}


def test_a_request_that_was_cancelled_stays_so(alone: list[list[int]]) -> None:
    drafter, planner = Interrupted("finish"), RandomPlanner(seed=1)
    with Engine(MODEL, drafters=[drafter], planner=planner, config=EngineConfig(**ROOMY)) as engine:
        names = submit_all(engine, PROMPTS[:3], max_new_tokens=NEW)
        engine.step()
        engine.cancel(names[0])
        engine.cancel(names[1])
        texts: Texts = {}
        assert step_on(engine, texts, KeyboardInterrupt) == 1
        assert texts[names[2]] == alone[2]
        assert max(len(texts[name]) for name in names[:2]) < NEW


def record_interrupted(folder: Path) -> None:
    """A run that ends between what a step decided and its events."""
    with SpeculativeDecoder(
        MODEL,
        drafters=["ngram"],
        policy=LatePlanner(seed=2),
        record=folder,
        acceptance_table=True,
        **ROOMY,
    ) as decoder:
        for number, _ in enumerate(decoder.stream(PROMPTS[:3], **GREEDY)):
            if number == 6:
                setattr(decoder.engine.scheduler, "commit", interrupt)  # noqa: B010


def test_a_recording_that_was_interrupted_has_its_acceptance_table(tmp_path: Path) -> None:
    """It is of the tokens that were told, whatever the last step had come to."""
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        record_interrupted(folder)
    assert "acceptance.parquet" in Trace(folder).header.files


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_recording_of_a_decoder_that_never_was_leaves_no_folder(tmp_path: Path) -> None:
    """Else the next attempt would be refused."""
    hook = MODEL.register_forward_pre_hook(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            SpeculativeDecoder(MODEL, record=tmp_path / "run", **ROOMY)
    finally:
        hook.remove()
    assert not (tmp_path / "run").exists()


# ---- the end, and the door


def test_an_engine_that_is_closed_amid_a_step_says_so() -> None:
    engine = engine_of()
    submit_all(engine, PROMPTS, max_new_tokens=NEW)
    engine.step()
    hook = MODEL.model.layers[0].register_forward_pre_hook(lambda *_: engine.close())
    try:
        with pytest.raises(EngineClosed, match="while it decoded"):
            engine.run()
    finally:
        hook.remove()


def test_a_stream_may_be_collected_while_another_request_is_made() -> None:
    """Collecting garbage may close it, in the thread and at the moment that holds the door."""
    intake = Intake(capacity_tokens=512, position_limit=None, vocab_size=61)
    with engine_of() as engine:
        (name,) = submit_all(engine, PROMPTS[:1], max_new_tokens=1)
        request = engine.requests[name]
        intake.add(lambda _: request, name, lambda _: None)
        done: list[bool] = []

        def make(_: str) -> Request:
            done.append(intake.cancel(name))
            raise Broken

        def add() -> None:
            with pytest.raises(Broken):
                intake.add(make, None, lambda _: None)

        thread = threading.Thread(target=add, daemon=True)
        thread.start()
        thread.join(10)
        assert done == [True]
        assert not thread.is_alive()
