"""One decoder and several consumers: each gets its own events, whatever becomes of the others."""

import random
from collections.abc import Mapping, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from sdcontrol import SpeculativeDecoder
from sdcontrol.core import BatchView, Confidence, Observation, Plan, Planner
from sdcontrol.engine.config import EngineConfig
from sdcontrol.engine.generation import decoding_of, prepare_config
from sdcontrol.engine.loop import Engine
from sdcontrol.errors import EngineClosed, UnsupportedGeneration
from sdcontrol.integrations.feed import Consumer
from tests.engine_support import (
    PROMPTS,
    ROOMY,
    LatePlanner,
    interrupt_at,
    noised,
    submit_all,
    tiny_model,
)

NEW = 16
GREEDY: Mapping[str, object] = {"max_new_tokens": NEW, "do_sample": False}
MODEL = tiny_model()
DRAFT = noised(MODEL)


def decoder_of(*, overlap: bool = False, policy: Planner | None = None) -> SpeculativeDecoder:
    return SpeculativeDecoder(
        MODEL,
        drafters=["ngram", "sparse_kv:32:scored", DRAFT],
        policy=policy or LatePlanner(seed=2),
        overlap=overlap,
        **ROOMY,
    )


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """What each prompt is continued with."""
    with Engine(MODEL, config=EngineConfig(**ROOMY)) as engine:
        names = submit_all(engine, PROMPTS, max_new_tokens=NEW)
        finished = engine.run()
        return [finished[name].output for name in names]


def test_a_name_may_be_used_again_while_its_first_owner_has_others(
    alone: list[list[int]],
) -> None:
    with SpeculativeDecoder(MODEL, **{**ROOMY, "max_batch_size": 1}) as decoder:
        first = decoder.stream(PROMPTS[:2], ids=["a", "b"], **GREEDY)
        for event in first:
            if event.request_id == "a" and event.finish_reason is not None:
                break
        second = decoder.stream(PROMPTS[2:3], ids=["a"], **GREEDY)
        tokens = list(next(second).tokens)
        first.close()  # type: ignore[attr-defined]
        for event in second:
            tokens.extend(event.tokens)
        assert tokens == alone[2]


class Failing(LatePlanner):
    """Somebody presses Ctrl-C while it learns from the step in which a request ended."""

    is_last = False

    def request_arrived(self, request_id: str, **_: object) -> None:
        """It is of no interest."""

    def tokens_emitted(self, request_id: str, tokens: Sequence[int], reason: str | None) -> None:
        self.is_last = reason == "length"

    def observe(self, observation: object) -> None:
        if self.is_last:
            self.is_last = False
            raise KeyboardInterrupt
        super().observe(observation)  # type: ignore[arg-type]


def test_what_a_step_emitted_arrives_though_it_failed_in_the_end(alone: list[list[int]]) -> None:
    with decoder_of(policy=Failing(seed=1)) as decoder:
        mine, others = Consumer(decoder._feed), Consumer(decoder._feed)
        for consumer, prompt in zip((mine, others), PROMPTS, strict=False):
            submitted = partial(decoder.engine.submit, prompt, **{**GREEDY, "max_new_tokens": 1})
            consumer.add(submitted)
        with pytest.raises(KeyboardInterrupt):
            list(mine)
        assert [event.tokens for event in others] == [tuple(alone[1][:1])]


class Broken(Exception):
    """What a user's own code raises."""


def raising(ids: Tensor, scores: Tensor | None) -> Tensor:
    raise Broken


def excluding_all(ids: Tensor, scores: Tensor) -> Tensor:
    return scores - torch.inf


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("what", ["criterion", "processor", "scores"])
def test_what_is_ones_own_fault_is_raised_to_nobody_else(
    alone: list[list[int]], what: str, *, overlap: bool
) -> None:
    """Whoever steps meets it first, on behalf of all."""
    settings = {**GREEDY, "do_sample": what == "scores"}
    config = prepare_config(MODEL, None, len(PROMPTS[0]), settings)
    decoding = decoding_of(
        MODEL,
        config,
        PROMPTS[0],
        processors={"processor": [raising], "scores": [excluding_all]}.get(what, []),
        criteria=[raising] if what == "criterion" else [],
    )
    with decoder_of(overlap=overlap) as decoder:
        engine = decoder.engine
        guilty, other = Consumer(decoder._feed), Consumer(decoder._feed)
        guilty.add(partial(engine.enqueue, PROMPTS[0], decoding))
        guilty.add(partial(engine.submit, PROMPTS[2], **GREEDY))
        other.add(partial(engine.submit, PROMPTS[1], **GREEDY))
        assert [token for event in other for token in event.tokens] == alone[1]
        with pytest.raises(UnsupportedGeneration if what == "scores" else Broken):
            list(guilty)
        assert not engine.has_work
        assert engine.drafting.quarantined == {}


def test_a_stream_of_a_closed_decoder_says_so() -> None:
    decoder = SpeculativeDecoder(MODEL, **ROOMY)
    stream = decoder.stream(PROMPTS[:1], **GREEDY)
    next(stream)
    decoder.close()
    with pytest.raises(EngineClosed):
        list(stream)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # some are lost
@pytest.mark.parametrize("overlap", [False, True])
def test_an_interrupt_anywhere_changes_nobodys_text(
    alone: list[list[int]], *, overlap: bool
) -> None:
    rng = random.Random(5)
    with decoder_of(overlap=overlap) as decoder:
        with interrupt_at(0) as counted:
            list(decoder.stream(PROMPTS[:2], **GREEDY))
        for _ in range(40):
            beside = decoder.stream(PROMPTS[2:4], **GREEDY)
            first = next(beside)
            texts: list[list[int]] = [[], []]
            texts[first.index].extend(first.tokens)
            try:
                with interrupt_at(rng.randrange(counted[0])):
                    list(decoder.stream(PROMPTS[:2], **GREEDY))
            except KeyboardInterrupt:
                pass
            for event in beside:
                texts[event.index].extend(event.tokens)
            assert texts == alone[2:4]
        engine = decoder.engine
        assert not engine.has_work
        assert engine.drafting.quarantined == {}
        assert engine.pool.free_blocks == engine.pool.num_blocks - 1
        engine.scheduler.check_integrity()
    assert vars(MODEL.config)["_attn_implementation_internal"] == "sdpa"


class Hesitant:
    """Has everybody drafted for, and submits nothing of it."""

    def plan(self, view: BatchView) -> Plan:
        return Plan.uniform(view, "draft_model", 2)

    def refine(self, view: BatchView, plan: Plan, confidence: Confidence) -> Plan:
        return Plan.off(view)

    def observe(self, observation: Observation) -> None:
        """It learns nothing."""


def test_a_draft_of_which_nothing_was_submitted_is_no_verification(alone: list[list[int]]) -> None:
    with decoder_of(policy=Hesitant()) as decoder:
        events = [*decoder.stream(PROMPTS[:1], **GREEDY)]
        reported = decoder.report().drafters["draft_model"]
    assert [token for event in events for token in event.tokens] == alone[0]
    for stats in (reported, events[-1].drafters["draft_model"]):
        assert stats.drafted > 0
        assert (stats.steps, stats.proposed, stats.acceptance_length) == (0, 0, 1.0)
