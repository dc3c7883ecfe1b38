"""The requests of a block, and what a meter makes of the steps that decode them."""

import json
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdcontrol.core import BatchView, Choice, Observation, Plan, RequestView, Timing
from sdcontrol.errors import ConfigError
from sdcontrol.experiments.config import Experiment, Slo
from sdcontrol.experiments.meter import Meter
from sdcontrol.experiments.samples import SampledStep, StepSampler, joined
from sdcontrol.experiments.workload import WorkItem, arrivals, block_items, check_files
from tests.ab_support import experiment


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def on_files(path: Path, lines: list[dict[str, object]], **workload: object) -> Experiment:
    path.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    return experiment(workload={"files": [str(path)], "requests_per_block": 3, **workload})


def items(plan: Experiment, block: int) -> list[WorkItem]:
    return block_items(plan, block, encode)


def test_a_block_has_the_same_requests_at_every_try_and_others_with_another_seed() -> None:
    plan = experiment(workload={"kinds": {"copy": 2, "code": 1}})
    other = experiment(workload={"kinds": {"copy": 2, "code": 1}}, seed=1)
    assert items(plan, 3) == items(plan, 3)
    assert [item.prompt for item in items(plan, 3)] != [item.prompt for item in items(plan, 4)]
    assert [item.prompt for item in items(plan, 3)] != [item.prompt for item in items(other, 3)]
    assert len({item.name for block in range(3) for item in items(plan, block)}) == 9


def test_every_prompt_of_a_file_comes_once_before_any_comes_again(tmp_path: Path) -> None:
    plan = on_files(tmp_path / "p.jsonl", [{"prompt": f"text {n}"} for n in range(6)])
    first, second = (
        [item.prompt for block in blocks for item in items(plan, block)]
        for blocks in ((0, 1), (2, 3))
    )
    assert len(set(first)) == len(set(second)) == 6
    assert first != second


def test_files_are_read_as_they_are_whoever_wrote_them(tmp_path: Path) -> None:
    text, lines = tmp_path / "a.txt", tmp_path / "b.JSONL"
    text.write_bytes("\ufeffa\r\nb".encode())
    lines.write_bytes('\ufeff{"prompt": "x"}\r\n'.encode())
    workload = {"files": [str(text), str(lines)], "requests_per_block": 2}
    found = items(experiment(workload=workload), 0)
    assert sorted(item.prompt for item in found) == sorted(map(tuple, map(encode, ("a\r\nb", "x"))))


def test_recorded_arrivals_keep_their_order_and_gaps(tmp_path: Path) -> None:
    lines = [{"prompt": f"t{n}", "arrival_seconds": 10.0 + n * n} for n in range(6)]
    rule = {"kind": "recorded", "speed": 2.0}
    plan = on_files(tmp_path / "p.jsonl", lines, arrivals=rule)
    found = items(plan, 1)
    assert [item.name.split()[1] for item in found] == ["p.jsonl:4", "p.jsonl:5", "p.jsonl:6"]
    assert [item.arrival_seconds for item in found] == [0.0, 3.5, 8.0]


def test_an_open_loop_has_the_stated_rate() -> None:
    """2,000 gaps: the mean lies within 4 standard errors (9 %)."""
    rule = {"kind": "open", "requests_per_second": 50.0}
    plan = experiment(workload={"kinds": {"copy": 1}, "arrivals": rule})
    times = arrivals(plan, 0, [0.0] * 2000)
    gaps = [after - before for before, after in pairwise(times)]  # type: ignore[operator]
    assert min(gaps) >= 0
    assert np.mean(gaps) == pytest.approx(1 / 50, rel=0.09)
    assert arrivals(plan, 0, [0.0] * 5) != arrivals(plan, 1, [0.0] * 5)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no prompt in"),
        ("{", r"p\.jsonl:1: "),
        ('{"prompt": "x"}\n{"text": "x"}', r"p\.jsonl:2: prompt"),
        ('{"prompt": ""}', "prompt"),
        ('{"prompt": "x", "arrival_seconds": -1}', "arrival_seconds"),
    ],
)
def test_a_bad_file_is_named_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=said):
        check_files(experiment(workload={"files": [str(path)]}))


def test_recorded_arrivals_must_be_in_the_file(tmp_path: Path) -> None:
    plan = on_files(tmp_path / "p.jsonl", [{"prompt": "x"}], arrivals={"kind": "recorded"})
    with pytest.raises(ConfigError, match="arrival_seconds"):
        check_files(plan)


def test_recorded_arrivals_must_be_in_order(tmp_path: Path) -> None:
    """Else gaps below 0 would be none, and the load another; a second file begins anew."""
    lines = [{"prompt": "x", "arrival_seconds": seconds} for seconds in (1.0, 3.0, 2.0)]
    rule = {"kind": "recorded"}
    with pytest.raises(ConfigError, match=r"p\.jsonl: arrival_seconds 2\.0 stands below 3\.0"):
        check_files(on_files(tmp_path / "p.jsonl", lines, arrivals=rule))
    check_files(on_files(tmp_path / "p.jsonl", lines))
    first = on_files(tmp_path / "first.jsonl", lines[:2], arrivals=rule)
    (tmp_path / "second.jsonl").write_text(json.dumps(lines[0]), encoding="utf-8")
    files = (*first.workload.files, str(tmp_path / "second.jsonl"))
    workload = first.workload.model_copy(update={"files": files})
    check_files(first.model_copy(update={"workload": workload}))


# ---- what a meter makes of steps


def step(drafted: int = 0, accepted: int = 0, proposed: int | None = None) -> Observation:
    """One request; with drafts, by the n-gram drafter, of which all is proposed unless said otherwise."""
    choice = Choice.of("ngram", drafted)
    submitted = drafted if proposed is None else proposed
    view = BatchView(0, (RequestView("r", 100, 1, 50, 0.0, ("ngram",)),), 1000)
    timing = Timing({"ngram": 0.1} if drafted else {}, 0.6, 0.2, 0.1)
    return Observation(
        view, Plan((choice,)), (drafted,), (submitted,), (accepted,), (accepted + 1,), timing
    )


def feed(meter: Meter, observation: Observation, begun: float, emitted: int) -> None:
    meter.emit("r", emitted, begun + 1.0)
    meter.step(
        observation,
        begun_seconds=begun,
        measured_seconds=1.0,
        emitted=emitted,
        predicted_seconds=None,
    )


def test_a_meter_counts_tokens_times_and_drafts() -> None:
    meter = Meter(most_steps=10, slo=Slo(ttft_seconds=2.5), start_seconds=5.0)
    meter.arrive("r", 1.0)
    feed(meter, step(), 2.0, 1)
    feed(meter, step(4, 2), 3.0, 3)
    feed(meter, step(4, 4), 4.0, 5)
    record = meter.record("on", seconds=5.0, forward=None, more={"peak_memory_bytes": 7.0})
    assert (record.tokens, record.num_requests) == (9, 1)
    assert record.latencies == {
        "ttft_seconds": (2.0,),
        "tpot_seconds": (0.25,),
        "e2e_seconds": (4.0,),
    }
    assert record.metrics["tokens_per_second"] == pytest.approx(9 / 5)
    assert record.metrics["slo_requests_per_second"] == pytest.approx(1 / 5)
    assert record.metrics["acceptance_length"] == 1 + 6 / 2
    assert record.metrics["acceptance_rate"] == 6 / 8
    assert record.metrics["wasted_draft_tokens"] == pytest.approx(2 / 9)
    assert record.metrics["peak_memory_bytes"] == 7.0
    shares = [
        record.metrics[f"{name}_share"] for name in ("draft", "verify", "controller", "overhead")
    ]
    assert sum(shares) == pytest.approx(1.0)
    assert record.lengths == {"off": {"0": 1}, "ngram": {"4": 2}}
    assert record.drafts["ngram"].by_position == ((2, 2), (2, 2), (2, 1), (1, 1))
    assert record.steps.time_seconds == (7.0, 8.0, 9.0)
    assert record.steps.choices == ({"off": 1}, {"ngram 4": 1}, {"ngram 4": 1})


def test_drafts_of_which_nothing_was_submitted_are_waste_and_no_verification() -> None:
    """As when a refinement drops all of a draft: it was computed all the same."""
    meter = Meter(most_steps=10, slo=Slo(), start_seconds=0.0)
    meter.arrive("r", 0.0)
    feed(meter, step(4, proposed=0), 0.0, 1)
    record = meter.record("on", seconds=1.0, forward=None, more={})
    assert record.metrics["wasted_draft_tokens"] == 4
    assert "acceptance_length" not in record.metrics
    feed(meter, step(4, 2), 1.0, 3)
    record = meter.record("on", seconds=2.0, forward=None, more={})
    assert record.metrics["wasted_draft_tokens"] == pytest.approx(6 / 4)
    assert record.metrics["acceptance_length"] == 3
    drafts = record.drafts["ngram"]
    assert (drafts.steps, drafts.drafted, drafts.proposed, drafts.accepted) == (1, 8, 4, 2)


def test_a_request_that_waited_too_long_does_not_count_for_goodput() -> None:
    meter = Meter(most_steps=10, slo=Slo(ttft_seconds=1.5), start_seconds=0.0)
    meter.arrive("r", 1.0)
    feed(meter, step(), 2.0, 1)
    assert (
        meter.record("on", seconds=3.0, forward=None, more={}).metrics["slo_requests_per_second"]
        == 0
    )


@given(st.integers(0, 500), st.integers(2, 20))
def test_sampled_steps_are_few_and_evenly_spread(number: int, most: int) -> None:
    sampler = StepSampler(most)
    for place in range(number):
        sampler.add(SampledStep(step(), float(place), 1.0, 1, None))
    times = sampler.sample(None).time_seconds
    assert len(times) == number if number < 2 * most else most <= len(times) < 2 * most
    assert len({after - before for before, after in pairwise(times)}) <= 1


@given(st.lists(st.integers(0, 30), max_size=5), st.integers(1, 40))
def test_joined_samples_keep_their_order_and_both_ends(counts: list[int], most: int) -> None:
    samples, place = [], 0
    for count in counts:
        sampler = StepSampler(100)
        for _ in range(count):
            sampler.add(SampledStep(step(), float(place), 1.0, 1, None))
            place += 1
        samples.append(sampler.sample(None))
    times = joined(samples, most).time_seconds
    assert len(times) == min(place, most)
    assert list(times) == sorted(set(times))
    if place and most > 1:
        assert (times[0], times[-1]) == (0.0, place - 1.0)


def test_a_file_looked_for_from_another_folder_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    away = experiment(workload={"files": ["prompts.jsonl"]})
    with pytest.raises(ConfigError, match=f"where it lies: now it is {re.escape(str(tmp_path))}"):
        check_files(away)
    away = experiment(workload={"files": [str(tmp_path / "prompts.jsonl")]})
    with pytest.raises(ConfigError, match=r"correct workload\.files$"):
        check_files(away)
