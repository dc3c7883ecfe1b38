"""`sdcontrol advise`: what it says about models and machines that are not there."""

import csv
import itertools
import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sdcontrol
from sdcontrol.cli import main
from sdcontrol.cli.advice_doubts import LEAST_SHARED_VOCABULARY
from sdcontrol.cli.advice_report import _scaled
from sdcontrol.estimators import hardware, shapes
from sdcontrol.estimators.machine_profile import MachineProfile, ModelTimes, StepTime
from sdcontrol.estimators.roofline import Calibration, Forward

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("SDCONTROL_DATA", ROOT.parent / "shared" / "data"))
Run = Callable[[list[str], Path], str]
Record = dict[str, Any]

SPREAD = ("--tensor-parallel", 32, "--draft-tensor-parallel", 32)
SMALL: dict[str, object] = {
    "model_type": "llama",
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "vocab_size": 128256,
}
COMMON = ("--model", "llama-3.1-8b", "--hardware", "h100", "--batch", 16, "--context", 8000)


@pytest.fixture
def advise(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., tuple[Record, str]]:
    """Runs `advise`; gives the JSON that it wrote and its text."""

    def run(*arguments: object) -> tuple[Record, str]:
        path = tmp_path / "advice.json"
        code = main(["advise", *map(str, arguments), "--json", str(path)])
        out, err = capsys.readouterr()
        assert (code, err) == (0, "")
        return json.loads(path.read_text("utf-8")), out

    return run


Advise = Callable[..., tuple[Record, str]]


# ---- what it says


def test_the_record_has_flops_bytes_intensity_ridge_and_bound(advise: Advise) -> None:
    told, _ = advise(*COMMON)
    forward = Forward(shapes.by_name("llama-3.1-8b"), hardware.by_name("H100"))
    expected = forward.profile(16, 16 * 8000, 16)
    assert told["plain"]["flops"] == pytest.approx(expected.flops)
    assert told["plain"]["bytes"] == pytest.approx(expected.bytes)
    assert told["plain"]["intensity_flops_per_byte"] == pytest.approx(
        expected.flops / expected.bytes
    )
    assert told["ridge_flops_per_byte"] == pytest.approx(989e12 / 3.35e12)
    assert told["bound"] == told["plain"]["bound"] == "memory"
    assert told["plain_seconds"] == told["plain"]["seconds"] == pytest.approx(expected.seconds)
    assert told["version"] == sdcontrol.__version__


def test_parts_and_overheads_add_up(advise: Advise) -> None:
    told, _ = advise(*COMMON, "--tensor-parallel", 4)
    for forward in (told["plain"], *told["verification"], told["drafting"][1]["round"]):
        assert [part["name"] for part in forward["parts"]] == [
            "weights",
            "kv",
            "activations",
            "head",
        ]
        seconds = sum(part["seconds"] for part in forward["parts"])
        seconds += forward["all_reduce_seconds"] + forward["overhead_seconds"]
        assert forward["seconds"] == pytest.approx(seconds)
        assert forward["flops"] == pytest.approx(sum(part["flops"] for part in forward["parts"]))
        assert forward["all_reduce_seconds"] > 0


def test_a_large_batch_of_short_contexts_is_compute_bound(advise: Advise) -> None:
    told, text = advise(*COMMON, "--batch", 1024, "--context", 128)
    assert told["bound"] == "compute"
    assert told["best"] is None
    assert text.splitlines()[-1].startswith("advice: do not speculate here")


def test_every_drafter_has_every_length_best_first(advise: Advise) -> None:
    rates = "ngram=0.3,sparse_kv:512=0.8,sparse_kv:2048=0.9,draft_model=0.7"
    told, _ = advise(
        *COMMON, "--draft-model", "llama-3.2-1b", "--acceptance", rates, "--max-draft-tokens", 5
    )
    options = told["options"]
    arms = ("ngram", "sparse_kv:512", "sparse_kv:2048", "draft_model")
    assert {(o["drafter"], o["num_draft_tokens"]) for o in options} == {
        (arm, length) for arm in arms for length in range(1, 6)
    }
    speedups = [option["speedup"] for option in options]
    assert speedups == sorted(speedups, reverse=True)
    assert told["best"] == options[0]


def test_an_option_is_its_rounds_and_its_verification(advise: Advise) -> None:
    told, _ = advise(*COMMON, "--draft-model", "llama-3.2-1b")
    verified = {v["num_draft_tokens"]: v["seconds"] for v in told["verification"]}
    rounds = {d["drafter"]: d["round_seconds"] for d in told["drafting"]}
    assert rounds["ngram"] == 0.0
    for option in told["options"]:
        length, rate = option["num_draft_tokens"], option["acceptance_rate"]
        assert option["verify_seconds"] == pytest.approx(verified[length])
        assert option["draft_round_seconds"] == pytest.approx(rounds[option["drafter"]])
        step = length * rounds[option["drafter"]] + verified[length]
        assert option["step_seconds"] == pytest.approx(step)
        tokens = (1 - rate ** (length + 1)) / (1 - rate)
        assert option["tokens_per_step"] == pytest.approx(tokens)
        assert option["speedup"] == pytest.approx(tokens * told["plain_seconds"] / step)


def test_the_text_says_what_the_record_says(advise: Advise) -> None:
    told, text = advise(*COMMON, "--acceptance", "sparse_kv:512=0.9")
    best = told["best"]
    lines = text.splitlines()
    assert "llama-3.1-8b on H100-SXM, batch 16, context 8000: memory-bound" in lines[0]
    assert lines[-1] == (
        f"advice: sparse_kv:512 with {best['num_draft_tokens']} draft tokens, "
        f"{best['speedup']:.2f}x the speed of decoding without drafts"
    )
    table = lines[next(i for i, line in enumerate(lines) if line.startswith("drafter")) + 1 :]
    shown = [float(line.split()[-1].rstrip("x")) for line in table if line.endswith("x")]
    assert shown == pytest.approx([o["speedup"] for o in told["options"]], abs=0.006)


@pytest.mark.parametrize(
    ("count", "shown"),
    [(999.4, "999"), (999.7, "1k"), (999.7e9, "1T"), (1e12, "1T"), (16.06e9, "16.1G")],
)
def test_counts_have_three_digits_and_a_prefix(count: float, shown: str) -> None:
    assert _scaled(count) == shown


def test_columns_stay_apart_where_steps_take_minutes(advise: Advise, tmp_path: Path) -> None:
    slow = replace(profile_of().hardware, bytes_per_second=7e8)
    profile_of().model_copy(update={"hardware": slow, "models": ()}).write(tmp_path / "p.json")
    machine = ("--hardware", tmp_path / "p.json", "--model", "llama-3.1-70b")
    told, text = advise(*machine, "--acceptance", "sparse_kv:512=0.8")
    assert told["plain_seconds"] > 100
    rows = [line.split() for line in text.splitlines() if line.endswith("x")]
    assert {len(row) for row in rows} == {7}


def test_rates_that_nobody_gave_are_marked_as_assumed(advise: Advise) -> None:
    told, text = advise(*COMMON, "--draft-model", "qwen3-0.6b", "--acceptance", "ngram=0.4")
    assumed = {d["drafter"]: d["is_rate_assumed"] for d in told["drafting"]}
    assert assumed == {"ngram": False, "draft_model": True}
    assert "assumed, not known: draft_model=0.7" in text
    assert "assumed" not in advise(*COMMON, "--acceptance", "ngram=0.4")[1]


def test_a_sparse_drafter_is_offered_only_beyond_its_budget(advise: Advise) -> None:
    rates = ("--acceptance", "sparse_kv:512=0.9,ngram=0.1")
    told, text = advise(*COMMON, "--context", 512, *rates)
    assert told["not_offered"] == ["sparse_kv:512"]
    assert {option["drafter"] for option in told["options"]} == {"ngram"}
    assert "sparse_kv:512 is left out" in text
    assert advise(*COMMON, "--context", 513, *rates)[0]["not_offered"] == []


def test_the_draft_model_reads_no_more_than_its_budget(advise: Advise) -> None:
    def round_of(*options: object) -> Record:
        given = ("--draft-model", "llama-3.2-1b", "--acceptance", "draft_model=0.7", *options)
        found: Record = advise(*COMMON, *given)[0]["drafting"][0]["round"]
        return found

    assert round_of("--draft-kv-budget", 512)["seconds"] < round_of()["seconds"]
    assert round_of("--draft-kv-budget", 9000) == round_of()


def test_a_draft_model_is_spread_over_no_more_devices_than_it_has_kv_heads(advise: Advise) -> None:
    given = (*COMMON, "--draft-model", "tinyllama", "--tensor-parallel", 8)
    assert advise(*given)[0]["draft_tensor_parallel"] == 4
    assert advise(*given, "--draft-tensor-parallel", 2)[0]["draft_tensor_parallel"] == 2


def test_what_does_not_fit_into_memory_is_said(advise: Advise) -> None:
    small, text = advise("--model", "llama-3.1-8b", "--hardware", "l4", "--batch", 1)
    assert small["fits_in_memory"]
    assert "beware" not in text
    big, text = advise("--model", "llama-3.1-70b", "--hardware", "l4", "--batch", 1)
    assert not big["fits_in_memory"]
    assert "beware: weights and KV cache take 142GB per device, of 24GB" in text


# ---- models and machines


def test_any_config_is_a_model(advise: Advise, tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    shape = shapes.by_name("llama-3.1-8b")
    config = {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    by_name, _ = advise(*COMMON)
    for given in (folder, folder / "config.json"):
        told, text = advise(*COMMON, "--model", given)
        assert told["model"]["name"] == "my-model"
        assert told["model"]["num_parameters"] == shape.num_parameters
        assert told["options"] == by_name["options"]
        assert text.startswith("my-model on")


def test_the_bundled_pair_is_known(advise: Advise) -> None:
    told, _ = advise("--model", "bundled", "--draft-model", "bundled", "--hardware", "l4")
    assert told["model"]["num_layers"] > told["draft_model"]["num_layers"]


TRUTH = Calibration(0.6, 0.3, layer_overhead_seconds=1e-4, token_overhead_seconds=1e-7)


def profile_of(dtype_bytes: float = 2.0, noise: float = 0.0, num_steps: int = 12) -> MachineProfile:
    """Of a machine on which llama-3.2-1b runs as `TRUTH` has it; every other step longer by `noise`."""
    machine = hardware.Hardware("my box", 2e12, 5e10, 64e9)
    shape = replace(
        shapes.by_name("llama-3.2-1b"),
        weight_bytes=dtype_bytes,
        head_bytes=dtype_bytes,
        kv_bytes=dtype_bytes,
    )
    forward = Forward(shape, machine, calibration=TRUTH)
    grid = itertools.product((1, 8, 32), (1, 4), (256, 2048))
    steps = tuple(
        StepTime(
            batch_size=batch,
            tokens_per_request=tokens,
            context_tokens=context,
            seconds=float(forward.seconds(batch * tokens, batch * context, batch))
            * (1.0 + noise * (number % 2)),
        )
        for number, (batch, tokens, context) in enumerate(grid)
    )
    dtype = {2.0: "bfloat16", 4.0: "float32"}[dtype_bytes]
    return MachineProfile(
        sdcontrol_version=sdcontrol.__version__,
        date="2026-01-01T00:00:00+00:00",
        machine={"device": "my box", "threads": 8},
        dtype=dtype,
        hardware=machine,
        models=(
            ModelTimes(
                role="target", name=shape.name, dtype=dtype, shape=shape, steps=steps[:num_steps]
            ),
        ),
    )


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    profile_of().write(path)
    return path


def test_a_profile_is_a_machine_and_calibrates_its_model(advise: Advise, profile: Path) -> None:
    told, text = advise("--hardware", profile, "--batch", 4, "--context", 1000)
    truth = Forward(
        shapes.by_name("llama-3.2-1b"), hardware.Hardware("my box", 2e12, 5e10, 64e9), 1, TRUTH
    )
    assert told["model"]["name"] == "llama-3.2-1b"
    assert told["hardware"]["name"] == "my box"
    assert told["plain_seconds"] == pytest.approx(float(truth.seconds(4, 4000, 4)), rel=0.03)
    verify = told["verification"][3]["seconds"]
    assert verify == pytest.approx(float(truth.seconds(20, 4000, 4)), rel=0.1)
    assert f"calibrated on {profile}: 12 measured steps" in text
    assert told["fit_median_error"] < 0.03


def test_another_model_on_a_profiled_machine_is_not_calibrated(
    advise: Advise, profile: Path
) -> None:
    told, text = advise("--hardware", profile, "--model", "qwen3-0.6b")
    assert told["calibrated_on"] is None
    assert "calibrated" not in text
    assert told["calibration"]["bandwidth_efficiency"] == 0.9


def test_a_profile_in_another_dtype_is_said_not_to_calibrate(
    advise: Advise, tmp_path: Path
) -> None:
    profile_of(dtype_bytes=4.0).write(tmp_path / "p.json")
    told, text = advise("--hardware", tmp_path / "p.json", "--model", "llama-3.2-1b")
    assert told["calibrated_on"] is None
    assert "the profile measured llama-3.2-1b in float32, this has 16 bits per weight" in text
    assert f"beware: {told['doubts'][0]}" in text.splitlines()
    measured, text = advise("--hardware", tmp_path / "p.json")
    assert measured["doubts"] == []
    assert "calibrated on" in text


def test_a_profile_is_not_doubted_for_more_devices_than_it_measured(
    advise: Advise, tmp_path: Path
) -> None:
    measured = profile_of()
    linked = replace(measured.hardware, link_bytes_per_second=5e10, hop_seconds=1e-6)
    measured.model_copy(update={"hardware": linked}).write(tmp_path / "p.json")
    one, _ = advise("--hardware", tmp_path / "p.json")
    two, text = advise("--hardware", tmp_path / "p.json", "--tensor-parallel", 2)
    assert two["plain_seconds"] < one["plain_seconds"]
    assert two["fit_median_error"] == one["fit_median_error"] < 0.03
    assert "beware" not in text


@pytest.mark.parametrize("num_steps", [1, 2])
def test_a_profile_of_too_few_steps_is_a_machine_and_says_so(
    advise: Advise, tmp_path: Path, num_steps: int
) -> None:
    profile_of(num_steps=num_steps).write(tmp_path / "p.json")
    told, text = advise("--hardware", tmp_path / "p.json")
    assert told["calibrated_on"] is None
    assert told["calibration"]["bandwidth_efficiency"] == 0.9
    assert f"llama-3.2-1b is not calibrated: the profile has {num_steps} measured step" in text
    assert "more of --batch, --tokens or --context" in text


def test_a_profile_that_fits_badly_is_doubted(advise: Advise, tmp_path: Path) -> None:
    profile_of(noise=1.5).write(tmp_path / "p.json")
    told, text = advise("--hardware", tmp_path / "p.json")
    assert told["fit_median_error"] > 0.1
    assert "beware: that is much; profile again with nothing else running" in text


def test_a_pair_that_the_engine_refuses_is_doubted(advise: Advise) -> None:
    _, text = advise(*COMMON, "--draft-model", "qwen3-0.6b")
    assert "beware: draft model qwen3-0.6b has 151936 tokens, llama-3.1-8b 128256" in text
    assert "beware" not in advise(*COMMON, "--draft-model", "llama-3.2-1b")[1]


def test_the_vocabularies_of_a_pair_are_judged_as_the_engine_does() -> None:
    from sdcontrol.engine.drafters.draft_model import _LEAST_SHARED_VOCABULARY

    assert LEAST_SHARED_VOCABULARY == _LEAST_SHARED_VOCABULARY


def test_a_smaller_cache_is_read_in_less_time(advise: Advise, profile: Path) -> None:
    def kv_part(*options: object) -> float:
        told, _ = advise(*options)
        return float(next(p["bytes"] for p in told["plain"]["parts"] if p["name"] == "kv"))

    assert kv_part(*COMMON, "--kv-dtype", "float8") == kv_part(*COMMON) / 2
    assert kv_part(*COMMON, "--kv-dtype", "bfloat16") == kv_part(*COMMON)
    told, text = advise("--hardware", profile, "--kv-dtype", "float8")
    assert told["calibration"] == advise("--hardware", profile)[0]["calibration"]
    assert told["model"]["kv_bytes"] == 1.0
    assert "12 measured steps" in text


# ---- calibration, and measurements by others


def test_a_fit_makes_the_plain_step_what_was_measured(advise: Advise, tmp_path: Path) -> None:
    truth = Calibration(0.55, layer_overhead_seconds=5e-5, token_overhead_seconds=3e-7)
    forward = Forward(shapes.by_name("llama-3.1-8b"), hardware.by_name("H100"), 1, truth)
    rows = [
        (batch, context, 1e3 * float(forward.seconds(batch, batch * context, batch)))
        for batch in (1, 16, 64)
        for context in (500, 8000)
    ]
    path = tmp_path / "steps.csv"
    lines = [f"{batch},{context},{ms},whatever" for batch, context, ms in [*rows, *rows]]
    path.write_text("\n".join(["batch_size,context_tokens,plain_ms,note", *lines]) + "\n")
    told, text = advise(*COMMON, "--fit", path)
    assert told["plain_seconds"] == pytest.approx(
        float(forward.seconds(16, 16 * 8000, 16)), rel=0.01
    )
    assert told["calibrated_on"] == str(path)
    assert "6 measured steps, median error 0." in text
    assert told["plain_seconds"] != advise(*COMMON)[0]["plain_seconds"]


def test_the_command_agrees_with_the_measurements_on_eight_a100(advise: Advise) -> None:
    """MagicDec, table 3, as published; calibrated on its plain steps alone."""
    path = DATA / "anchors" / "magicdec_table3_llama2.csv"
    if not path.exists():
        pytest.skip(f"{path} is absent; set SDCONTROL_DATA to the folder of public data")
    machine = ("--hardware", "A100-80GB", "--tensor-parallel", 8, "--fit", path)
    models = ("--model", "llama-2-7b", "--draft-model", "tinyllama", "--draft-kv-budget", 512)
    cells: dict[tuple[str, str], dict[str, dict[str, str]]] = {}
    for row in csv.DictReader(path.read_text().splitlines()):
        arm = "draft_model" if row["pair"].startswith("a_") else "sparse_kv:512"
        cells.setdefault((row["batch_size"], row["context_tokens"]), {})[arm] = row
    errors: dict[str, list[float]] = {"plain": [], "verify": [], "draft": [], "speedup": []}
    for (batch, context), rows in cells.items():
        rates = ",".join(f"{arm}={acceptance_of(row)}" for arm, row in rows.items())
        given = ("--batch", batch, "--context", context, "--max-draft-tokens", 2)
        told, _ = advise(*models, *machine, *given, "--acceptance", rates)
        two = {o["drafter"]: o for o in told["options"] if o["num_draft_tokens"] == 2}
        for arm, row in rows.items():
            for name, predicted, measured in (
                ("plain", told["plain_seconds"] * 1e3, row["plain_ms_per_token"]),
                ("verify", two[arm]["verify_seconds"] * 1e3, row["verify_ms"]),
                ("draft", two[arm]["draft_seconds"] * 1e3, row["draft_ms"]),
                ("speedup", two[arm]["speedup"], row["speedup"]),
            ):
                errors[name].append(abs(predicted / float(measured) - 1.0))
        named = max(two, key=lambda arm: float(two[arm]["speedup"]))
        if len(rows) == 2:
            best = max(float(row["speedup"]) for row in rows.values())
            assert float(rows[named]["speedup"]) >= 0.97 * best, (batch, context)
    medians = {name: float(np.median(values)) for name, values in errors.items()}
    limits = {"plain": 0.07, "verify": 0.12, "draft": 0.15, "speedup": 0.10}
    assert all(medians[name] <= limit for name, limit in limits.items()), medians


def acceptance_of(row: dict[str, str]) -> float:
    """1 + a + a^2 tokens per step."""
    return (math.sqrt(4.0 * float(row["tokens_per_step"]) - 3.0) - 1.0) / 2.0


# ---- errors


def write_odd_files(folder: Path) -> None:
    """Models and profiles with sizes that none has, and a link to itself."""
    odd_sizes: dict[str, dict[str, object]] = {
        "huge": {"hidden_size": 10**400},
        "tall": {"num_hidden_layers": 10_001},
        "text": {"hidden_size": "4096"},
        "thin": {"intermediate_size": -1},
    }
    for name, odd in odd_sizes.items():
        (folder / f"{name}.json").write_text(json.dumps(SMALL | odd))
    (folder / "loop.json").symlink_to("loop.json")
    unlinked, vast, crowded = (json.loads(profile_of().model_dump_json()) for _ in range(3))
    unlinked["hardware"]["link_bytes_per_second"] = math.nan
    vast["models"][0]["shape"]["vocab_size"] = 10**400
    (folder / "unlinked.json").write_text(json.dumps(unlinked))
    crowded["models"][0]["steps"][0]["batch_size"] = 10**400
    (folder / "crowded.json").write_text(json.dumps(crowded))
    (folder / "vast.json").write_text(json.dumps(vast))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hardware", "h100"], "--model is missing"),
        (["--model", "llama-3.1-8b"], "--hardware"),
        (["--model", "llama-3.1-8", "--hardware", "h100"], "did you mean llama-3.1-8b or"),
        (["--model", "gone/config.json", "--hardware", "h100"], "gone/config.json cannot be read"),
        (["--model", "bad.json", "--hardware", "h100"], "bad.json is no JSON"),
        (["--model", "list.json", "--hardware", "h100"], "list.json holds no JSON object"),
        (
            ["--model", "empty.json", "--hardware", "h100"],
            "empty.json describes no model that can be priced: config has no hidden_size",
        ),
        (
            ["--model", "qwen3-8b", "--draft-model", "list.json", "--hardware", "h100"],
            "list.json holds no JSON object",
        ),
        (["--model", "huge.json", "--hardware", "h100"], "has hidden_size beyond 1000000000"),
        (
            ["--model", "tall.json", "--hardware", "h100"],
            "num_hidden_layers 10001; it must be from",
        ),
        (["--model", "text.json", "--hardware", "h100"], "hidden_size '4096'; it must be a whole"),
        (["--model", "thin.json", "--hardware", "h100"], "intermediate_size -1; it must be from 0"),
        (["--model", "loop.json", "--hardware", "h100"], "loop.json cannot be read"),
        ([*COMMON, "--fit", "loop.json"], "loop.json cannot be read"),
        (["--model", "qwen3-8b", "--hardware", "loop.json"], "loop.json cannot be read"),
        (["--hardware", "unlinked.json"], "link bytes/s nan"),
        (["--hardware", "vast.json"], "vocab_size"),
        (["--hardware", "crowded.json"], "batch_size"),
        (["--model", "qwen3-8b", "--hardware", "h100-sx"], "did you mean H100-SXM or"),
        (["--model", "qwen3-8b", "--hardware", "CPU"], "measure yours by `sdcontrol profile`"),
        (["--model", "qwen3-8b", "--hardware", "gone.json"], "gone.json cannot be read"),
        (["--model", "qwen3-8b", "--hardware", "empty.json"], "empty.json is no machine profile"),
        ([*COMMON, "--batch", "0"], "--batch is 0"),
        ([*COMMON, "--context", 10**400], "--context is more than 1000000000"),
        ([*COMMON, "--max-draft-tokens", 10**9], "--max-draft-tokens is more than 1000"),
        ([*COMMON, "--tensor-parallel", "64"], "has 32 attention heads"),
        (
            [*COMMON, *SPREAD, "--draft-model", "qwen3-0.6b"],
            "qwen3-0.6b has 16 attention heads",
        ),
        ([*COMMON, "--kv-dtype", "int3"], "invalid choice: 'int3'"),
        (
            [*COMMON, "--fit", "none.csv"],
            "none.csv has plain steps at 0 different loads (batch size and context); give at least 3",
        ),
        ([*COMMON, "--fit", "instant.csv"], "in 1e-300 s"),
        (["--model", "qwen3-8b", "--hardware", "endless.json"], "seconds"),
        ([*COMMON, "--batch", "many"], "invalid int value: 'many'"),
        ([*COMMON, "--max-draft-tokens", "0"], "--max-draft-tokens is 0"),
        ([*COMMON, "--draft-kv-budget", "512"], "no --draft-model"),
        (
            [*COMMON, "--draft-model", "qwen3-0.6b", "--draft-tensor-parallel", "2"],
            "--draft-tensor-parallel is 2, of 1 devices",
        ),
        (
            [*COMMON, "--fit", "one.csv"],
            "plain steps at 1 different loads (batch size and context); give at least 3",
        ),
        ([*COMMON, "--fit", "same.csv"], "plain steps at 1 different loads"),
        ([*COMMON, "--fit", "short.csv"], "short.csv line 2: ms is None"),
        ([*COMMON, "--acceptance", "ngram"], "write DRAFTER=RATE"),
        ([*COMMON, "--acceptance", "ngram=1.1"], "acceptance of ngram is '1.1'"),
        ([*COMMON, "--acceptance", "ngram=nan"], "acceptance of ngram is 'nan'"),
        ([*COMMON, "--acceptance", "ngrm=0.1"], "did you mean ngram"),
        ([*COMMON, "--acceptance", "sparse_kv=0.1"], "did you mean sparse_kv:<tokens>"),
        ([*COMMON, "--acceptance", "sparse_kv:0=0.1"], "did you mean sparse_kv:<tokens>"),
        ([*COMMON, "--acceptance", "sparse_kv:9:best=0.1"], "did you mean sparse_kv:<tokens>"),
        (
            [*COMMON, "--acceptance", f"sparse_kv:{'9' * 5000}=0.1"],
            "did you mean sparse_kv:<tokens>",
        ),
        ([*COMMON, "--acceptance", "ngram=0.1,ngram=0.2"], "names ngram twice"),
        ([*COMMON, "--acceptance", "draft_model=0.1"], "give --draft-model"),
        ([*COMMON, "--fit", "gone.csv"], "gone.csv cannot be read"),
        ([*COMMON, "--fit", "bad.json"], "it needs batch_size"),
        ([*COMMON, "--fit", "wide.csv"], "wide.csv is no CSV: field larger than"),
        (["--model", "deep.json", "--hardware", "h100"], "deep.json is no JSON"),
        ([*COMMON, "--json", "gone/advice.json"], "gone/advice.json cannot be written"),
    ],
)
def test_what_cannot_be_asked_ends_with_one_line_and_code_2(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[object],
    message: str,
) -> None:
    same = [f"1,512,{ms}" for ms in (6.0, 6.1, 6.2)]
    (tmp_path / "same.csv").write_text("\n".join(["batch_size,context_tokens,ms", *same]))
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "wide.csv").write_text(f"batch_size,context_tokens,ms\n1,128,{'5' * 200_000}\n")
    (tmp_path / "empty.json").write_text("{}")
    (tmp_path / "one.csv").write_text("batch_size,context_tokens,ms\n1,128,5\n")
    (tmp_path / "none.csv").write_text("batch_size,context_tokens,ms\n")
    instant = "".join(f"{batch},128,1e-297\n" for batch in (1, 2, 3))
    (tmp_path / "instant.csv").write_text("batch_size,context_tokens,ms\n" + instant)
    endless = json.loads(profile_of().model_dump_json())
    endless["models"][0]["steps"][0]["seconds"] = 12345
    text = json.dumps(endless).replace("12345", "1e400")
    (tmp_path / "endless.json").write_text(text)
    (tmp_path / "short.csv").write_text("batch_size,context_tokens,ms\n1,128\n")
    write_odd_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["advise", *map(str, arguments)]) == 2
    line = capsys.readouterr().err
    assert line.startswith("sdcontrol: error: ")
    assert line.count("\n") == 1
    assert message in line


def test_advice_needs_no_torch(run: Run) -> None:
    arguments = ["advise", *map(str, COMMON), "--draft-model", "bundled"]
    program = (
        f"import sys, sdcontrol.cli\nsdcontrol.cli.main({arguments!r})\n"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    assert run([sys.executable, "-c", program], ROOT).splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("factor", "spread", "beware"),
    [
        (1.0, 0.0, None),
        (0.77, 0.0, "beware: they ask for a bandwidth efficiency above 1; check --model"),
        (1.0, 0.6, "beware: that is much;"),
    ],
)
def test_a_calibration_that_may_be_none_says_so(
    advise: Advise, tmp_path: Path, factor: float, spread: float, beware: str | None
) -> None:
    """Steps too fast for the bandwidth of the machine, or every other one far too slow."""
    forward = Forward(shapes.by_name("llama-3.1-8b"), hardware.by_name("H100"))
    loads = [(batch, context) for batch in (1, 16, 64) for context in (500, 4000, 8000)]
    lines = ["batch_size,context_tokens,seconds"]
    for row, (batch, context) in enumerate(loads):
        seconds = factor * float(forward.seconds(batch, batch * context, batch))
        lines.append(f"{batch},{context},{seconds * (1.0 + spread * (row % 2)):.9f}")
    path = tmp_path / "steps.csv"
    path.write_text("\n".join(lines))
    _, text = advise(*COMMON, "--fit", path)
    assert (beware in text) if beware else ("beware" not in text)


def test_steps_of_a_slower_machine_a_larger_model_or_another_unit_are_doubted(
    advise: Advise, tmp_path: Path
) -> None:
    """Whatever weights and KV do not take would be a layer's overhead, and the fit as good as any."""
    path = tmp_path / "steps.csv"
    for model, machine, factor, doubted in (
        ("llama-3.1-8b", "L4", 1.0, True),
        ("llama-3.1-70b", "H100", 1.0, True),
        ("llama-3.1-8b", "H100", 1000.0, True),
        ("llama-3.1-8b", "H100", 1.0, False),
    ):
        forward = Forward(shapes.by_name(model), hardware.by_name(machine))
        steps = [(batch, float(forward.seconds(batch, batch * 512, batch))) for batch in (1, 4, 16)]
        rows = [f"{batch},512,{factor * seconds:.9f}" for batch, seconds in steps]
        path.write_text("\n".join(["batch_size,context_tokens,seconds", *rows]))
        told, text = advise(*COMMON, "--fit", path)
        assert told["fit_median_error"] < 0.01
        assert ("to launches and gaps" in text) == doubted


@pytest.mark.parametrize(
    ("model", "devices", "doubted"),
    [
        ("qwen2.5-7b", 4, False),
        ("qwen2.5-7b", 7, True),  # 28 heads, 4 KV heads
        ("qwen2.5-7b", 8, True),
        ("llama-3.1-8b", 3, True),
        ("llama-3.1-8b", 16, False),  # each KV head twice
    ],
)
def test_heads_that_devices_cannot_share_are_doubted(
    advise: Advise, model: str, devices: int, doubted: bool
) -> None:
    told, text = advise("--model", model, "--hardware", "h100", "--tensor-parallel", devices)
    assert any("cannot share evenly" in doubt for doubt in told["doubts"]) == doubted
    assert ("beware" in text) == doubted


@pytest.mark.parametrize(
    ("settings", "batch", "doubt"),
    [
        ({"dtype": "float32"}, 1, "weights of 32 bits"),
        ({"quantization_config": {"quant_method": "fp8"}}, 1, None),  # bound by memory at any speed
        ({"quantization_config": {"quant_method": "fp8"}}, 64, "weights of 8 bits"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, 64, None),  # computed in bf16
        ({}, 64, None),
    ],
)
def test_weights_that_are_not_computed_with_in_bf16_are_doubted(
    advise: Advise, tmp_path: Path, settings: Record, batch: int, doubt: str | None
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL | settings))
    told, _ = advise("--model", path, "--hardware", "h100", "--batch", batch)
    assert [doubt in own for own in told["doubts"]] == ([True] if doubt else [])
