"""Made-up results of the shape that a run gives, for the tests of its page."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from sdcontrol.experiments.results import Results

POLICIES = ("off", "static:ngram:4", "goodput", "static:draft_model:3", "threshold")
SPEEDS = (1.0, 1.21, 1.42, 0.94, 1.01)
DRAFTERS = ("ngram", "draft_model", "sparse_kv:128")
SECONDS_PER_BLOCK = 6.0


def make_results(
    names: Sequence[str] = POLICIES[:4],
    *,
    num_blocks: int = 12,
    num_steps: int = 2000,
    **changes: Any,
) -> Results:
    """Results with a clear winner, a clear loser and an A/A drift of nothing."""
    rng = np.random.default_rng(7)
    roof = {
        "peak_flops_per_second": 8e10,
        "bandwidth_bytes_per_second": 1.2e10,
        "ridge": 8e10 / 1.2e10,
    }
    arms = [
        _arm(rng, index, name, num_arms=len(names), num_blocks=num_blocks, num_steps=num_steps)
        | {"roofline": roof | {"source": "measured before the run"}}
        for index, name in enumerate(names)
    ]
    per_block = [
        (block, float(ratio))
        for block, ratio in enumerate(rng.normal(1, 0.012, num_blocks + 1))
        if block
    ]
    facts: dict[str, Any] = {
        "name": "demo",
        "title": "Mixed prompts on the bundled models",
        "created": "2026-01-31T12:00:00+00:00",
        "is_complete": True,
        "is_simulated": False,
        "setting": {
            "machine": "x86_64, 16 GiB",
            "processor": "Some processor at 3.0 GHz",
            "threads": 2,
            "device": "cpu",
            "versions": {"python": "3.11.9", "torch": "2.13.0", "sdcontrol": "0.1.0"},
        },
        "config": {
            "arms": [{"name": name, "policy": {"kind": name}} for name in names],
            "blocks": num_blocks,
        },
        "baseline": names[0],
        "arms": arms,
        "comparisons": [
            c for arm in range(1, len(names)) for c in _comparisons(names, arm, num_blocks)
        ],
        "drift": {
            "ratio": {"value": 1.001, "low": 0.994, "high": 1.008},
            "noise": 0.012,
            "per_block": per_block,
            "smallest_ratio": 1.009,
        },
        "texts": {"num_compared": 288, "num_differing": 0},
        "verdict": "The adaptive policy ran 1.42 times as fast as no speculation "
        "(95 % interval 1.38 to 1.46), with the same text.",
        "stopping": {
            "num_blocks": num_blocks,
            "planned_blocks": num_blocks,
            "num_warmup_blocks": 1,
            "reason": "all planned blocks were run.",
        },
    }
    return Results.model_validate(facts | changes)


def _comparisons(names: Sequence[str], arm: int, num_blocks: int) -> list[dict[str, Any]]:
    speed = SPEEDS[arm]
    found = []
    for metric, ratio, words in (
        ("tokens_per_second", speed, ("faster", "slower")),
        ("ttft_seconds_p50", 1 / speed, ("better", "worse")),
        ("tpot_seconds_p50", 1 / speed, ("better", "worse")),
        ("e2e_seconds_p99", 1 / speed, ("better", "worse")),
    ):
        is_clear = abs(speed - 1) > 0.03
        verdict = words[speed < 1] if is_clear else "no difference shown"
        found.append(
            {
                "arm": names[arm],
                "baseline": names[0],
                "metric": metric,
                "ratio": {"value": ratio, "low": ratio * 0.97, "high": ratio * 1.03},
                "p_value": 0.0005 if is_clear else 0.6,
                "p_adjusted": 0.004 if is_clear else 1.0,
                "num_blocks": num_blocks,
                "num_blocks_needed": 6 if is_clear else None,
                "verdict": verdict,
                "sentence": f"{names[arm]} against {names[0]} by {metric}: {verdict}.",
            }
        )
    return found


def _arm(
    rng: np.random.Generator,
    index: int,
    name: str,
    *,
    num_arms: int,
    num_blocks: int,
    num_steps: int,
) -> dict[str, Any]:
    speed = SPEEDS[index]
    starts = [
        (block * num_arms + (index + block) % num_arms) * SECONDS_PER_BLOCK
        for block in range(num_blocks + 1)
    ]
    rates = 310 * speed * rng.normal(1, 0.02, num_blocks + 1)
    blocks = [
        {
            "block": block,
            "seconds": 1500 / rate,
            "tokens": 1500,
            "tokens_per_second": rate,
            "start_seconds": start,
            "is_warmup": block == 0,
            "metrics": {
                "tokens_per_second": rate,
                "tpot_seconds_p50": 0.019 / speed * rng.normal(1, 0.02),
                "ttft_seconds_p50": 0.05 / speed * rng.normal(1, 0.03),
            },
        }
        for block, (start, rate) in enumerate(zip(starts, rates, strict=True))
    ]
    steps = _steps(rng, index, blocks, num_steps)
    return {
        "name": name,
        "description": f"arm {index}",
        "policy": {"kind": name},
        "metrics": _metrics(speed),
        "blocks": blocks,
        "lengths": _lengths(steps["choices"]),
        "acceptance": {
            "ngram": {
                "drafted": 9000,
                "proposed": 8500,
                "accepted": 5100,
                "by_position": [(3000, 2200), (2200, 1500), (1500, 900)],
                "acceptance_length": 2.7,
            }
        }
        if index
        else {},
        "latencies": {
            "ttft_seconds": _quantiles(rng.lognormal(-3.0, 0.35, 400) / speed),
            "tpot_seconds": _quantiles(rng.lognormal(-4.0, 0.2, 400) / speed),
            "e2e_seconds": _quantiles(rng.lognormal(0.6, 0.3, 400) / speed),
        },
        "steps": steps,
    }


def _metrics(speed: float) -> dict[str, Any]:
    facts = {
        "tokens_per_second": (310 * speed, "tokens/s", True),
        "slo_requests_per_second": (2.8 * speed, "requests/s", True),
        "ttft_seconds_p50": (0.050 / speed, "s", False),
        "ttft_seconds_p99": (0.11 / speed, "s", False),
        "tpot_seconds_p50": (0.0186 / speed, "s", False),
        "tpot_seconds_p99": (0.029 / speed, "s", False),
        "e2e_seconds_p50": (1.8 / speed, "s", False),
        "e2e_seconds_p99": (3.6 / speed, "s", False),
        "acceptance_length": (1 + (speed - 0.9) * 3, "tokens", True),
        "draft_share": (0.08 * speed, "share", None),
        "verify_share": (0.8, "share", None),
        "peak_memory_bytes": (512e6 * (1 + speed / 9), "bytes", False),
    }
    return {
        name: {
            "value": value,
            "low": value * 0.98,
            "high": value * 1.02,
            "unit": unit,
            "higher_is_better": wish,
        }
        for name, (value, unit, wish) in facts.items()
    }


def _steps(
    rng: np.random.Generator, index: int, blocks: list[dict[str, Any]], num_steps: int
) -> dict[str, Any]:
    per_block = max(1, num_steps // len(blocks))
    times = np.concatenate(
        [b["start_seconds"] + np.linspace(0, b["seconds"] * 0.999, per_block) for b in blocks]
    )
    progress = np.linspace(0, 1, times.size)
    batch = rng.integers(1, 9, times.size)
    length = np.clip(
        np.round(5 * np.sin(3 * progress) + rng.normal(0, 1, times.size)), 0, 7
    ).astype(int)
    fixed = {0: 0, 1: 4, 3: 3}
    length = np.full(times.size, fixed[index]) if index in fixed else length
    drafter = np.where(progress + rng.normal(0, 0.2, times.size) > 0.5, 0, 1)
    choices = []
    for requests, planned, which in zip(
        batch.tolist(), length.tolist(), drafter.tolist(), strict=True
    ):
        who = {1: "ngram", 3: "draft_model"}.get(index, DRAFTERS[which])
        drafting = {f"{who} {planned}": requests} if planned else {"off": requests}
        if index == 2 and requests > 4 and planned:
            drafting = {f"{who} {planned}": requests - 3, "off": 2, f"{DRAFTERS[2]} 2": 1}
        choices.append(drafting)
    tokens = batch * (1 + length)
    predicted = 0.008 + 0.0004 * tokens
    measured = predicted * rng.lognormal(0.02, 0.1, times.size)
    intensity = 2.0 * tokens / (1 + 0.01 * tokens)
    emitted = np.round(measured * 310 * SPEEDS[index] * rng.normal(1, 0.1, times.size)).astype(int)
    return {
        "time_seconds": times.tolist(),
        "batch_size": batch.tolist(),
        "num_tokens": tokens.tolist(),
        "kv_tokens": (batch * 400).tolist(),
        "intensity": intensity.tolist(),
        "flops_per_second": np.minimum(
            8e10, 1.2e10 * intensity * rng.uniform(0.5, 0.9, times.size)
        ).tolist(),
        "predicted_seconds": [None if i % 50 == 0 else p for i, p in enumerate(predicted.tolist())],
        "measured_seconds": measured.tolist(),
        "draft_seconds": (measured * (0.08 if index else 0)).tolist(),
        "verify_seconds": (measured * 0.75).tolist(),
        "controller_seconds": (measured * 0.01).tolist(),
        "overhead_seconds": (measured * (0.16 if index else 0.24)).tolist(),
        "emitted": emitted.tolist(),
        "choices": choices,
    }


def _lengths(choices: list[dict[str, int]]) -> dict[str, dict[str, int]]:
    counts: Counter[str] = Counter()
    for step in choices:
        counts.update(step)
    found: dict[str, dict[str, int]] = {}
    for text, count in counts.items():
        drafter, _, length = text.rpartition(" ")
        found.setdefault(drafter or text, {})[length if drafter else "0"] = count
    return found


def _quantiles(values: np.ndarray) -> list[float]:
    return np.quantile(values, np.linspace(0, 1, 101)).tolist()
