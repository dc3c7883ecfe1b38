"""Generated workloads: alike at every reading, and what their settings say on average.

Statistical tests have fixed seeds; their bounds are at least five standard errors wide, so a correct
implementation would fail one for fewer than one seed in a million.
"""

import math
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from sdcontrol.errors import ConfigError
from sdcontrol.outcomes import ArmOutcomes
from sdcontrol.traces.acceptance_process import AcceptanceProcess
from sdcontrol.traces.step_times import CostTimes, LinearCost
from sdcontrol.traces.what_if import simulate
from sdcontrol.traces.workload import SimulatedRequest, Workload
from sdcontrol.traces.workloads import (
    GeneratedWorkload,
    mixture,
    with_contexts_of,
    with_drafters,
)

CONFIG: dict[str, object] = {
    "kind": "generated",
    "num_requests": 40,
    "arrivals": {"kind": "poisson", "rate_per_second": 4.0},
    "requests": [
        {
            "name": "chat",
            "share": 3,
            "prompt_tokens": {"kind": "log_normal", "median": 200, "sigma": 0.8, "most": 4000},
            "output_tokens": {"kind": "uniform", "low": 5, "high": 60},
            "acceptance": {"draft_model": {"rates": [0.7, 0.6], "concentration": 8}},
        },
        {
            "name": "code",
            "prompt_tokens": {"kind": "fixed", "tokens": 700},
            "output_tokens": {"kind": "fixed", "tokens": 50},
            "acceptance": {
                "draft_model": {"rates": [0.8], "hard": {"share": 0.2}, "tells_confidence": True}
            },
        },
    ],
}


def seen(requests: Iterator[SimulatedRequest] | Workload) -> list[tuple[object, ...]]:
    """Everything that makes requests equal."""
    return [
        (
            request.id,
            request.arrival_seconds,
            request.prompt_tokens,
            request.output_tokens,
            *(
                (arm, found.accepted.tolist(), None if (c := found.confidence) is None else c.sum())
                for arm, found in request.acceptance.items()
            ),
        )
        for request in requests
    ]


# ---- generated workloads


def test_every_reading_of_a_seed_is_alike_and_seeds_differ() -> None:
    made = GeneratedWorkload.model_validate(CONFIG)
    once = seen(made.workload())
    assert once == seen(made.workload()) == seen(made.workload().first(40))
    assert once != seen(made.model_copy(update={"seed": 1}).workload())
    assert made.workload().origin == made.model_dump(mode="json")
    assert GeneratedWorkload.model_validate(made.model_dump(mode="json")) == made


def test_a_generated_workload_runs_in_the_simulation() -> None:
    made = GeneratedWorkload.model_validate(CONFIG).workload()
    result = simulate(made, "static:draft_model:2", CostTimes(LinearCost(5e-3, 1e-5)))
    assert (result.num_requests, result.num_refused) == (40, 0)
    assert result.output_tokens == sum(request.output_tokens for request in made)
    assert result.arms["draft_model"].accepted > 0


def test_kinds_come_in_their_shares() -> None:
    made = GeneratedWorkload.model_validate({**CONFIG, "num_requests": 2000}).workload()
    chats = sum(request.id.startswith("chat") for request in made)
    assert abs(chats / 2000 - 0.75) < 5 * math.sqrt(0.75 * 0.25 / 2000)


def test_many_requests_are_never_in_memory_together() -> None:
    plain = {**CONFIG, "num_requests": 20_000}
    plain["requests"] = [
        {
            "prompt_tokens": {"kind": "fixed", "tokens": 9},
            "output_tokens": {"kind": "fixed", "tokens": 9},
        }
    ]
    made = GeneratedWorkload.model_validate(plain).workload()
    tracemalloc.start()
    try:
        assert sum(1 for _ in made) == 20_000
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "change",
    [
        {"num_requests": 0},
        {"surprise": 1},
        {"requests": []},
        {"arrivals": {"kind": "poisson", "rate_per_second": 0}},
        {"arrivals": {"kind": "tides"}},
        {"arrivals": {"kind": "gamma", "rate_per_second": 1, "cv": float("nan")}},
        {"arrivals": {"kind": "gamma", "rate_per_second": 1, "cv": 1e-200}},
        {"arrivals": {"kind": "gamma", "rate_per_second": 1e-320, "cv": 100}},
        {
            "arrivals": {
                "kind": "on_off",
                "on_rate_per_second": 1e-9,
                "on_seconds": 1,
                "off_seconds": 1,
            }
        },
    ],
)
def test_settings_that_cannot_be_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        GeneratedWorkload.model_validate({**CONFIG, **change})


# ---- putting workloads together


def texts(name: str, number: int, arms: tuple[str, ...] = ("ngram",)) -> Workload:
    requests = [
        SimulatedRequest(
            f"{name}{i}",
            0.0,
            10 + i,
            4,
            {arm: ArmOutcomes(np.full(4, i % 3, dtype=np.uint8)) for arm in arms},
        )
        for i in range(number)
    ]
    return Workload.of(name, requests)


def test_drawn_arms_stand_beside_recorded_ones_and_change_nothing_else() -> None:
    recorded = texts("edit", 6)
    both = with_drafters(recorded, {"draft_model": AcceptanceProcess(rates=(0.5,))}, seed=3)
    assert both.arms == ("ngram", "draft_model")
    assert seen(both) == seen(both)
    for request, before in zip(both, recorded, strict=True):
        assert request.acceptance["ngram"] is before.acceptance["ngram"]
        assert request.acceptance["draft_model"].output_tokens == before.output_tokens
    with pytest.raises(ConfigError, match="other names"):
        with_drafters(both, {"ngram": AcceptanceProcess(rates=(0.5,))})


def test_contexts_come_from_one_and_outputs_from_the_other() -> None:
    lengths = Workload.of(
        "long",
        [
            SimulatedRequest(
                f"m{i}", float(i), 5000 + i, 7, contents=np.array([0, i]), tokens_per_content=512
            )
            for i in range(2)
        ],
    )
    joined = list(with_contexts_of(texts("edit", 5), lengths))
    assert [request.prompt_tokens for request in joined] == [5000, 5001, 5000, 5001, 5000]
    assert [request.output_tokens for request in joined] == [4] * 5
    assert joined[1].contents is not None
    assert joined[1].contents.tolist() == [0, 1]


@settings(max_examples=20)
@given(st.integers(0, 1000))
def test_a_mixture_takes_from_every_part_by_weight(seed: int) -> None:
    made = mixture("mixed", [(texts("a", 3), 1.0), (texts("b", 50), 3.0)], 300, seed=seed)
    ids = [request.id for request in made]
    assert len(set(ids)) == 300
    assert ids == [request.id for request in made]
    share = sum(":b" in name for name in ids) / 300
    assert abs(share - 0.75) < 6 * math.sqrt(0.75 * 0.25 / 300)


def test_parts_with_different_arms_cannot_be_mixed() -> None:
    other = texts("b", 2, arms=("draft_model",))
    with pytest.raises(ConfigError, match="different arms"):
        mixture("mixed", [(texts("a", 2), 1.0), (other, 1.0)], 10)
    with pytest.raises(ConfigError, match="positive weights"):
        mixture("mixed", [(texts("a", 2), 0.0)], 10)
    with pytest.raises(ConfigError, match="no requests"):
        list(mixture("mixed", [(Workload("none", ("ngram",), tuple), 1.0)], 1))
