"""The formats one by one: what their fields mean is what the simulation gets."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from sdcontrol.errors import ConfigError
from sdcontrol.outcomes import DEPTH, ArmOutcomes
from sdcontrol.traces.importers import read_azure, read_mooncake, read_vllm, tokenizer_from
from sdcontrol.traces.simulate import SimulationSettings
from sdcontrol.traces.what_if import simulate
from tests.import_support import TIMES, characters, good_rows, matcher, response, texts, written

# ---- Mooncake


def test_equal_ids_share_prompt_blocks_in_the_simulation(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 1000 * i, "input_length": 1024, "output_length": 2, "hash_ids": ids}
        for i, ids in enumerate([[5, 6], [5, 6], [7, 8]])
    ]
    path = written(tmp_path / "file", "mooncake", [json.dumps(row) for row in rows])
    workload = read_mooncake(path).workload
    contents = [request.token_contents() for request in workload]
    assert [len(tokens) for tokens in contents] == [1024] * 3
    assert (contents[0] == contents[1]).all()
    assert not np.isin(contents[2], contents[0]).any()
    shared = simulate(workload, "off", TIMES)
    alone = simulate(workload, "off", TIMES, SimulationSettings(prefix_sharing=False))
    assert alone.busy_seconds - shared.busy_seconds > 900 * 1e-5  # most of a prompt


@pytest.mark.parametrize("ids", [[1], [1, 2, 3], None, [1, -2], [1, 2.0], [1, True], [1, 1 << 60]])
def test_ids_that_do_not_fit_the_prompt_are_malformed(ids: object, tmp_path: Path) -> None:
    row = {"timestamp": 10**6, "input_length": 600, "output_length": 1, "hash_ids": ids}
    path = written(tmp_path / "f", "mooncake", [*good_rows("mooncake", 100), json.dumps(row)])
    assert "hash_ids" in read_mooncake(path).report.malformed[0].reason


# ---- texts


def test_texts_have_what_the_matcher_finds_at_every_position(tmp_path: Path) -> None:
    row = {"prompt": "hello world", "output": "hello world!", "task": "any"}
    path = written(tmp_path / "file", "texts", [json.dumps(row)])
    (request,) = texts(path).workload
    assert (request.prompt_tokens, request.output_tokens) == (11, 12)
    assert request.token_contents().tolist() == characters("hello worldhello world!")
    found = request.acceptance["ngram"].accepted
    assert found.tolist() == matcher(request.token_contents(), 11).accepted.tolist()
    assert found[1] == 10  # after "h": all but "!"


def test_texts_with_one_id_stay_apart(tmp_path: Path) -> None:
    rows = [json.dumps({"id": 7, "prompt": "ab", "output": "ab"})] * 3
    ids = [request.id for request in texts(written(tmp_path / "f", "texts", rows)).workload]
    assert ids == ["7", "7 (line 2)", "7 (line 3)"]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "", "output": "a"},
        {"prompt": "a", "output": 5},
        {"prompt": "a", "output": "half of a pair \ud800"},
    ],
)
def test_texts_without_words_are_malformed(row: object, tmp_path: Path) -> None:
    path = written(tmp_path / "f", "texts", [*good_rows("texts", 100), json.dumps(row)])
    assert texts(path).report.num_malformed == 1


def test_any_tokenizers_file_will_do(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert list(tokenizer_from(tmp_path / "tokenizer.json")("a b c a")) == [0, 1, 2, 0]
    (tmp_path / "broken.json").write_text("{}")
    for name in ("broken.json", "absent.json"):
        with pytest.raises(ConfigError, match="no tokenizer"):
            tokenizer_from(tmp_path / name)


def test_a_text_that_a_tokenizer_has_no_tokens_for_is_told_in_one_line(tmp_path: Path) -> None:
    Tokenizer(models.WordLevel({"a": 0}, unk_token="?")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot tokenize 'b': .*; give the"):
        tokenizer_from(tmp_path / "tokenizer.json")("b")


def test_texts_take_the_arrivals_of_another_file(tmp_path: Path) -> None:
    arrivals = read_azure(written(tmp_path / "a", "azure", good_rows("azure", 5))).workload
    both = texts(written(tmp_path / "t", "texts", good_rows("texts", 2))).workload
    joined = list(both.with_arrivals_of(arrivals))
    assert [request.arrival_seconds for request in joined] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert {request.output_tokens for request in joined} == {4}


# ---- vLLM


def outcomes_of(row: dict[str, object], tmp_path: Path) -> ArmOutcomes:
    path = written(tmp_path / "file", "vllm", [json.dumps(row)])
    (request,) = read_vllm(path, arm="head").workload
    return request.acceptance["head"]


def test_vllm_steps_become_outcomes_by_position_and_no_more_than_is_known(tmp_path: Path) -> None:
    found = outcomes_of(response([2, 3], [3, 3], 8), tmp_path)
    assert found.accepted.tolist() == [0, 2, 1, 0, 3, 2, 1, 0]
    limits = found.max_draft_tokens
    assert limits is not None
    assert limits.tolist() == [0, DEPTH, DEPTH, DEPTH, 3, 2, 1, 0]


@st.composite
def decoded(draw: st.DrawFn) -> tuple[list[bool], list[int], list[int], list[int]]:
    """A text's hits, and the steps of a decode of it with drafts of changing length."""
    hits = draw(st.lists(st.booleans(), min_size=30, max_size=60))
    place, starts, accepted, drafted = 1, [], [], []
    while place < 20:
        of = draw(st.integers(1, 6))
        run = next((n for n in range(of) if not hits[place + n]), of)
        starts.append(place)
        accepted.append(run)
        drafted.append(of)
        place += run + 1
    return hits, starts, accepted, drafted


@settings(
    max_examples=50,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    deadline=None,
)
@given(case=decoded())
def test_vllm_outcomes_agree_with_the_text_wherever_they_are_known(
    case: tuple[list[bool], list[int], list[int], list[int]], tmp_path: Path
) -> None:
    hits, starts, accepted, drafted = case
    output = starts[-1] + accepted[-1] + 1
    found = outcomes_of(response(accepted, drafted, output), tmp_path)
    limits = found.max_draft_tokens
    assert limits is not None
    for place in range(output):
        run = next((n for n, hit in enumerate(hits[place:]) if not hit), len(hits) - place)
        assert min(found.accepted[place], limits[place]) == min(run, limits[place])
    for start, of in zip(starts, drafted, strict=True):
        assert limits[start] >= of


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (response([1], [2], 9), "steps without drafts"),
        (response([1, 1], [2, 2], 3), "steps without drafts"),
        (response([3], [2], 5), "more tokens accepted"),
        (response([1], [2, 2], 3), "alike"),
        (response([1], [2], 3, metrics={"speculative_decoding": None}), "speculative_decoding"),
        (response([1], [2], 3, metrics={"speculative_decoding": {}}), "detailed"),
        (response([1], [2], 3, usage={"prompt_tokens": 1}), "completion_tokens"),
        (response([1], [2], 3, id="v5"), "stands in a row above"),
        (response([1], [2], 3, arrival_seconds=2.5), "another clock"),
    ],
)
def test_vllm_responses_that_say_too_little_are_malformed(
    row: dict[str, object], reason: str, tmp_path: Path
) -> None:
    path = written(tmp_path / "file", "vllm", [*good_rows("vllm", 100), json.dumps(row)])
    assert reason in read_vllm(path).report.malformed[0].reason


def test_vllm_requests_are_put_in_order_and_a_client_knows_better_when(tmp_path: Path) -> None:
    rows = [
        response([1], [2], 3, id="b", arrival_seconds=12.5),
        response([1], [2], 3, id="a", arrival_seconds=12.0),
    ]
    path = written(tmp_path / "file", "vllm", [json.dumps(row) for row in rows])
    found = [(request.id, request.arrival_seconds) for request in read_vllm(path).workload]
    assert found == [("a", 0.0), ("b", 0.5)]
