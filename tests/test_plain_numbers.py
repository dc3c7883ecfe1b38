"""True and false are no numbers, wherever settings are given."""

from collections.abc import Mapping
from typing import Any

import pytest
from pydantic import ValidationError

from sdcontrol import policies
from sdcontrol.engine.config import EngineConfig
from sdcontrol.errors import ConfigError
from sdcontrol.plain_numbers import PlainNumbers
from sdcontrol.traces.workloads import GeneratedWorkload


class Everything(PlainNumbers):
    count: int = 1
    share: float | None = None
    by_batch: Mapping[int, tuple[int, ...]] = {}
    is_on: bool = True
    either: int | bool = 1
    words: tuple[str, ...] = ()


@pytest.mark.parametrize(
    "given",
    [
        {"count": True},
        {"share": False},
        {"by_batch": {1: [2, True]}},
        {"by_batch": {True: [2]}},
    ],
    ids=repr,
)
def test_a_truth_value_is_refused_where_a_number_is_meant(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="Input should be a valid"):
        Everything.model_validate(given)


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ({"count": "3"}, 3),
        ({"share": 1}, 1.0),
        ({"share": None}, None),
        ({"by_batch": {"1": [2, 3]}}, {1: (2, 3)}),
        ({"is_on": False}, False),
        ({"either": True}, True),
        ({"words": ["true"]}, ("true",)),
    ],
    ids=repr,
)
def test_whatever_else_was_taken_still_is(given: dict[str, Any], taken: object) -> None:
    ((name, _),) = given.items()
    assert getattr(Everything.model_validate(given), name) == taken


@pytest.mark.parametrize(
    "spec",
    [
        {"kind": "static", "drafter": "ngram", "num_draft_tokens": True},
        {"kind": "goodput", "probe_share": False},
        {"kind": "concurrency_schedule", "schedule": {4: True}},
        {"kind": "ema_steps", "candidates": {8: [True, 3]}},
        {"kind": "throughput_aware", "candidates": {8: [True, 3]}},
    ],
    ids=repr,
)
def test_no_policy_takes_one_for_a_number(spec: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="Input should be a valid"):
        policies.build(spec)


def test_nor_does_an_engine_or_a_workload() -> None:
    with pytest.raises(ValidationError, match="Input should be a valid"):
        EngineConfig(max_batch_size=True)
    assert not EngineConfig(cuda_graphs=False).cuda_graphs
    kind = {"prompt_tokens": {"kind": "fixed", "tokens": 9}, "output_tokens": {"kind": "fixed"}}
    given = {"num_requests": 1, "arrivals": {"kind": "at_once"}, "requests": [kind]}
    for tokens, rates in ((True, [0.5]), (9, [True])):
        kind["output_tokens"] = {"kind": "fixed", "tokens": tokens}
        kind["acceptance"] = {"ngram": {"rates": rates}}
        with pytest.raises(ValidationError, match="Input should be a valid"):
            GeneratedWorkload.model_validate(given)
