"""The file of a comparison: what it may say, and where an error in it is."""

import json
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sdcontrol.errors import ConfigError
from sdcontrol.experiments.config import Experiment
from sdcontrol.experiments.loading import json_schema, load_experiments
from tests.ab_support import ROOT, experiment

ALLOWED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
FILES = sorted((ROOT / "experiments").glob("*.yaml"))
VALID = """\
name: demo
arms:
  - name: off
    policy: off
  - name: fixed
    policy: {kind: static, drafter: ngram, num_draft_tokens: 4}
  - name: adaptive
    policy: goodput
    drafters: [ngram, "sparse_kv:128", draft_model]
    engine: {block_size: 32}
pairs: [[adaptive, fixed]]
workload:
  kinds: {code: 1, copy: 2}
  arrivals: {kind: closed, concurrency: 4}
stopping: {alpha: 0.05, looks: 3}
"""
PLACE = re.compile(r"^[^\n]*?:(\d+):(\d+): [^\n]+$")


def load(folder: Path, text: str, *overrides: str) -> list[Experiment]:
    path = folder / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return load_experiments(path, overrides)


def complaint(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as raised:
        load(folder, text, *overrides)
    return str(raised.value)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_files_that_come_along_are_valid(path: Path) -> None:
    assert load_experiments(path)


def test_settings_read_back_give_the_same_experiment(tmp_path: Path) -> None:
    whole = load(tmp_path, VALID)[0]
    again = Experiment.model_validate(yaml.safe_load(yaml.safe_dump(whole.resolved())))
    assert again.resolved() == whole.resolved()
    assert again.engine_of(again.arms[2]).block_size == 32
    assert again.engine_of(again.arms[0]).block_size == 16


@pytest.mark.parametrize(
    ("old", "new", "line", "said"),
    [
        ("workload:", "worklod:", 12, "did you mean 'workload'?"),
        ("concurrency", "concurency", 14, "did you mean 'concurrency'?"),
        ("concurrency: 4", "concurrency: 0", 14, "greater than or equal to 1"),
        ("closed", "clsed", 14, "'closed', 'open', 'recorded'"),
        ("drafter: ngram", "drfter: ngram", 6, "did you mean 'drafter'?"),
        ("num_draft_tokens: 4", "num_draft_tokens: -4", 6, "greater than or equal to 0"),
        ("goodput", "godput", 8, "did you mean 'goodput'?"),
        ("adaptive, fixed", "adaptive, fixd", 11, "did you mean 'fixed'?"),
        ("copy", "cpy", 13, "did you mean 'copy'?"),
        ("block_size", "block_sise", 10, "did you mean 'block_size'?"),
        ("alpha: 0.05", "alpha: .nan", 15, "finite"),
        ("draft_model]", "draftmodel]", 9, "did you mean 'draft_model'?"),
        ("kinds: {code: 1, copy: 2}", "min_tokens: 5", 12, "exactly one of"),
        ("stopping:", "name: twice\nstopping:", 15, "given in line 1 already"),
        ("stopping:", "stopping: [", 16, "no YAML"),
        (
            "  - name: off\n    policy: off",
            "  - <<: {name: off}\n    policy: off",
            3,
            "write the keys",
        ),
        ("policy: off", "policy: !!python/name:os.system x", 4, "no YAML"),
        (
            "num_draft_tokens: 4",
            "num_draft_tokens: true",
            6,
            "num_draft_tokens=True: Input should be a valid integer",
        ),
        (
            "concurrency: 4",
            "concurrency: true",
            14,
            "True: Input should be a valid integer; give requests in flight",
        ),
        ("block_size: 32", "block_size: true", 10, "valid integer; give tokens per KV block"),
        ("alpha: 0.05", "alpha: true", 15, "True: Input should be a valid number"),
        ("copy: 2", "copy: false", 13, "False: Input should be a valid integer"),
        ("block_size: 32", 'block_size: !!int ""', 10, "no such value"),
        ("block_size: 32", "block_size: !!timestamp soon", 10, "no such value"),
        ("block_size: 32", f"block_size: 0x{'f' * 5000}", 10, "no such value"),
    ],
)
def test_an_error_says_where_it_is_and_what_would_do(
    tmp_path: Path, old: str, new: str, line: int, said: str
) -> None:
    message = complaint(tmp_path, VALID.replace(old, new, 1))
    place = PLACE.match(message)
    assert place, message
    assert (int(place[1]), said in message) == (line, True), message


def test_off_is_a_policy_and_no_boolean(tmp_path: Path) -> None:
    assert load(tmp_path, VALID)[0].arms[0].policy.model_dump() == {"kind": "off"}


@pytest.mark.parametrize(("text", "number"), [("010", 10), ("08", 8), ("12", 12), ("0", 0)])
def test_a_number_that_begins_with_a_zero_is_what_it_looks_like(
    tmp_path: Path, text: str, number: int
) -> None:
    assert load(tmp_path, f"seed: {text}\n{VALID}")[0].seed == number
    assert load(tmp_path, VALID, f"seed={text}")[0].seed == number


def test_a_time_is_no_number_of_seconds(tmp_path: Path) -> None:
    assert "'1:30': Input should be a valid integer" in complaint(tmp_path, VALID, "blocks=1:30")
    assert "'1:30.5': Input" in complaint(tmp_path, VALID, "slo.ttft_seconds=1:30.5")


def test_a_run_may_be_called_by_its_day(tmp_path: Path) -> None:
    assert load(tmp_path, VALID.replace("demo", "2026-11-30"))[0].name == "2026-11-30"


def test_a_number_where_a_name_belongs_is_to_be_quoted(tmp_path: Path) -> None:
    said = complaint(tmp_path, VALID.replace("demo", "20261130"))
    assert said.endswith(
        "name: 20261130: Input should be a valid string; give letters, digits and . _ = -, in quotes"
    )
    assert load(tmp_path, VALID.replace("demo", '"20261130"'))[0].name == "20261130"


def test_numbers_are_read_in_every_plain_form(tmp_path: Path) -> None:
    for text in ("0.05", ".05", "5e-2", "5.0e-2", "5.E-2", "+0.05"):
        assert load(tmp_path, VALID, f"stopping.alpha={text}")[0].stopping.alpha == 0.05
    assert load(tmp_path, VALID, "blocks=1_000")[0].blocks == 1000
    assert "finite" in complaint(tmp_path, VALID, "slo.ttft_seconds=.inf")


def test_overrides_replace_values_and_a_new_kind_drops_old_settings(tmp_path: Path) -> None:
    found = load(tmp_path, VALID, "arms.1.policy.kind=off", "blocks=3", "slo.ttft_seconds=0.5")[0]
    assert found.arms[1].policy.model_dump() == {"kind": "off"}
    assert found.blocks == 3
    assert found.slo.ttft_seconds == 0.5


def test_a_key_of_a_mapping_may_be_a_number(tmp_path: Path) -> None:
    """Those of a schedule are batch sizes."""
    schedule = "{kind: concurrency_schedule, drafter: ngram, schedule: {4: 4, 8: 2}}"
    text = VALID.replace("{kind: static, drafter: ngram, num_draft_tokens: 4}", schedule)
    found = load(tmp_path, text, "arms.1.policy.schedule.8=3")[0].arms[1].policy
    assert found.model_dump()["schedule"] == {4: 4, 8: 3}
    cells = load(tmp_path, text + "matrix: {arms.1.policy.schedule.16: [0, 1]}\n")
    assert [one.arms[1].policy.model_dump()["schedule"][16] for one in cells] == [0, 1]
    wrong = complaint(tmp_path, text, "arms.1.policy.schedule.8=x")
    assert "schedule.8='x': Input should be a valid integer" in wrong


@pytest.mark.parametrize(
    "override", ["blocks", "=3", "arms.9.name=x", "blocks=[", "blocks=-1", "blcks=1", ".=2"]
)
def test_a_bad_override_is_named(tmp_path: Path, override: str) -> None:
    assert f"--set {override}" in complaint(tmp_path, VALID, override)


def test_a_matrix_gives_a_run_per_combination(tmp_path: Path) -> None:
    text = VALID + "matrix: {workload.arrivals.concurrency: [1, 4], seed: [7, 8]}\n"
    found = load(tmp_path, text)
    assert len({run.name for run in found}) == 4
    assert [run.workload.arrivals.concurrency for run in found] == [1, 1, 4, 4]
    assert [run.seed for run in found] == [7, 8, 7, 8]


def test_runs_of_a_matrix_have_names_of_their_own(tmp_path: Path) -> None:
    text = VALID.replace("demo", "d" * 60) + "matrix: {MATRIX}\n"
    alike = "title: [a b, a/b, A b], seed: [1, 2]"
    long = f"model: [{'m' * 24}], draft_model: [{'m' * 24}], seed: [1, 2], blocks: [3, 4]"
    for matrix, number in ((alike, 6), (long, 4)):
        names = [run.name for run in load(tmp_path, text.replace("MATRIX", matrix))]
        assert len({name.casefold() for name in names}) == len(names) == number
        assert max(map(len, names)) <= 120


def test_a_value_that_comes_twice_in_a_matrix_is_found_in_its_line(tmp_path: Path) -> None:
    message = complaint(tmp_path, VALID + "matrix:\n  blocks:\n    - 2\n    - 2\n")
    assert ":19:" in message
    assert "matrix.blocks: 2 comes twice" in message


def test_a_bad_value_in_a_matrix_is_found_in_its_line(tmp_path: Path) -> None:
    message = complaint(tmp_path, VALID + "matrix:\n  blocks:\n    - 3\n    - -3\n")
    assert ":19:" in message
    assert "blocks" in message


def test_the_schema_describes_every_valid_file() -> None:
    schema = json.loads(json_schema())
    assert set(schema["properties"]) == set(Experiment.model_fields)
    kinds = {
        option["properties"]["kind"]["const"]
        for option in schema["$defs"]["Arm"]["properties"]["policy"]["anyOf"]
        if "properties" in option
    }
    assert {"off", "static", "goodput"} <= kinds
    references = re.findall(r'"#/\$defs/(\w+)"', json.dumps(schema))
    assert set(references) <= set(schema["$defs"])


PIECES = st.sampled_from(
    [
        *("", "-", ":", "[", "]", "{", "}", "*a", "&a ", "!!int ", "?", "|", "'", '"', "#", "\t"),
        *("\x00", "\n", "  ", "~", "0", "-1", "1e999", "off", "null", ".inf", "2026-99-99", "<<: "),
        *("\ufeff", "\u00e9", "9" * 5000, "[" * 300, "name: x", "policy", "kind: learned", "1:99"),
    ]
)


@settings(max_examples=300, suppress_health_check=ALLOWED)
@given(st.data())
def test_a_damaged_file_is_refused_with_place_and_remedy_or_is_valid(tmp_path: Path, data) -> None:
    text = VALID
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        end = min(len(text), start + data.draw(st.integers(0, 8)))
        text = text[:start] + data.draw(PIECES) + text[end:]
    _refused_or_valid(tmp_path, text)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=300, suppress_health_check=ALLOWED)
@given(st.data())
def test_a_wrong_value_anywhere_is_refused_with_place_and_remedy_or_is_valid(
    tmp_path: Path, data
) -> None:
    config = yaml.safe_load(VALID)
    node: object = config
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = data.draw(st.sampled_from(keys))
        if not (isinstance(node[key], dict | list) and node[key]) or data.draw(st.booleans()):
            break
        node = node[key]
    node[key] = data.draw(values)
    _refused_or_valid(tmp_path, yaml.safe_dump(config, allow_unicode=True))


@given(text=st.text(max_size=60))
@settings(suppress_health_check=ALLOWED)
def test_any_text_at_all_is_refused_with_place_and_remedy(tmp_path: Path, text: str) -> None:
    _refused_or_valid(tmp_path, text)


def _refused_or_valid(folder: Path, text: str) -> None:
    try:
        assert load(folder, text)
    except ConfigError as error:
        message = str(error)
        assert PLACE.match(message), message
        assert ";" in message or "did you mean" in message, message


def test_two_arms_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two arms"):
        experiment(arms=[{"name": "a", "policy": "off"}] * 2)


def test_a_metric_that_comes_twice_is_refused(tmp_path: Path) -> None:
    """It would be corrected for twice, and nothing is compared twice."""
    twice = "metrics: [tokens_per_second, ttft_seconds_p50, tokens_per_second]\n"
    assert "a metric comes twice" in complaint(tmp_path, VALID + twice)
