"""Is a what-if replay of the recorded policy the recording?

    python -m benchmarks.self_replay [--json]

The bundled pair decodes short texts on this machine with an n-gram drafter, a draft model and sparse
self-speculation on offer, under `goodput`, which refines its drafts between rounds, in 5 kinds of text
and 3 batch sizes, and under every fixed and rival policy once; every second request is sampled. Each
recording is replayed what-if under its own policy:

    tokens      per request and in all, as recorded or not
    repeated    steps of the recording that the replay takes: same work, by all counts
    recorded    throughput, replay over recording, where a step that is repeated takes the recorded
                time: what is left is what the simulation does otherwise
    fitted      the same with step times fitted to the recording, as a replay has them by default:
                policies that learn from measured times now learn from smoother ones

Throughput is tokens over the seconds of all steps. Nothing is hidden by the machine's noise: both
sides of a ratio are of the same recording, so the figures hold on a busy machine, too.
"""

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.measuring import write_results
from sdcontrol.controller import Controller
from sdcontrol.engine.bundled import KINDS, held_out_prompts, load_bundled, load_bundled_tokenizer
from sdcontrol.engine.config import EngineConfig
from sdcontrol.engine.drafters.build import DrafterSpec
from sdcontrol.engine.loop import Engine
from sdcontrol.engine.request import Request
from sdcontrol.errors import TraceError
from sdcontrol.integrations.acceptance import add_acceptance_table
from sdcontrol.integrations.recording import facts_of_run
from sdcontrol.traces.reader import Trace
from sdcontrol.traces.recorded_times import RecordedTimes
from sdcontrol.traces.recorder import Recorder
from sdcontrol.traces.replay_result import ReplayResult
from sdcontrol.traces.what_if import what_if

BATCHES = (1, 4, 16)
LEAST_REQUESTS = 3  # also one after another
PROMPT_TOKENS, NEW_TOKENS = 150, 96
SEED = 4
OTHERS: tuple[str | Mapping[str, object], ...] = (
    "off",
    "static:ngram:4",
    "static:draft_model:3",
    "static:sparse_kv:64:3",
    "roofline",
    *(
        {"kind": kind, "drafter": "draft_model"}
        for kind in ("smartspec", "ema_steps", "budget_argmax", "heuristic", "concurrency_schedule")
    ),
)
OTHERS_CELL = ("prose", 4)


class Live:
    """The bundled pair and its texts."""

    def __init__(self) -> None:
        self.target, draft = (
            load_bundled(name, dtype=torch.float32) for name in ("target", "draft")
        )
        self.drafters: list[DrafterSpec] = ["ngram", draft, "sparse_kv:64"]
        self._tokenizer = load_bundled_tokenizer()

    def record(
        self, policy: str | Mapping[str, object], kind: str, batch: int, folder: Path
    ) -> Trace:
        """A run with its acceptance table."""
        config = EngineConfig(kv_tokens=8192, max_batch_size=batch)
        with Recorder(Controller(policy), folder, keep_token_ids=True) as recorder:
            engine = Engine(self.target, drafters=self.drafters, planner=recorder, config=config)
            recorder.describe(facts_of_run(engine, self.drafters))
            with engine:
                requests = self._submit(engine, kind, max(batch, LEAST_REQUESTS))
                engine.run()
        add_acceptance_table(folder, self.target, self.drafters, requests, config=config)
        return Trace(folder)

    def _submit(self, engine: Engine, kind: str, count: int) -> list[Request]:
        texts = held_out_prompts(kind, count, seed=SEED, min_tokens=PROMPT_TOKENS)
        for number, text in enumerate(texts):
            engine.submit(
                list(self._tokenizer(text)["input_ids"])[:PROMPT_TOKENS],
                request_id=f"r{number}",
                seed=number,
                do_sample=number % 2 == 1,
                max_new_tokens=NEW_TOKENS,
            )
        return [engine.requests[f"r{number}"] for number in range(count)]


def judge(trace: Trace, policy: str | Mapping[str, object], cell: str) -> dict[str, object]:
    """The recording beside its replays."""
    steps = list(trace.steps())
    observations = [step.observation for step in steps]
    times = RecordedTimes.of(trace)
    replays = [what_if(trace, policy, times=times)]
    refusal = ""
    try:
        replays.append(what_if(trace, policy))
    except TraceError as error:
        refusal = str(error)
    drafted: Counter[str] = Counter()
    beyond = 0
    for seen in observations:
        for choice, length, right in zip(
            seen.plan.choices, seen.drafted, seen.accepted, strict=True
        ):
            if choice.drafter is not None and length:
                drafted[choice.drafter] += length
                beyond += max(length - right - 1, 0) if choice.drafter != "ngram" else 0
    tokens = sum(record.output_tokens for record in trace.requests())
    rate = tokens / sum(seen.timing.total_seconds for seen in observations)
    ratios = [replay.tokens_per_busy_second / rate for replay in replays]
    return {
        "policy": policy if isinstance(policy, str) else policy["kind"],
        "workload": cell,
        "tokens": tokens,
        "same_tokens": all(is_same_text_length(trace, replay) for replay in replays),
        "drafted": dict(drafted),
        "drafted_by_models_beyond_a_wrong_token": beyond,
        "steps": len(steps),
        "steps_repeated": times.num_repeated if replays[0].num_steps == len(steps) else 0,
        "throughput_with_recorded_times": round(ratios[0], 5),
        "throughput_with_fitted_times": round(ratios[1], 5) if not refusal else None,
        **({"fitted_times_refused": refusal} if refusal else {}),
    }


def is_same_text_length(trace: Trace, replay: ReplayResult) -> bool:
    """Whether every request was given its recorded number of tokens."""
    recorded = {record.id: record.output_tokens for record in trace.requests()}
    told = dict(zip(replay.times.ids, replay.times["output_tokens"], strict=True))
    return told == recorded and replay.output_tokens == sum(recorded.values())


def summary(rows: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """How many agree, and the worst."""
    told: dict[str, object] = {
        "recordings": len(rows),
        "same_tokens": sum(bool(row["same_tokens"]) for row in rows),
        "all_steps_repeated": sum(row["steps_repeated"] == row["steps"] for row in rows),
    }
    for name in ("recorded", "fitted"):
        ratios = [row[f"throughput_with_{name}_times"] for row in rows]
        errors = sorted(abs(float(str(ratio)) - 1.0) for ratio in ratios if ratio is not None)
        told[name] = {
            "replays": len(errors),
            "within_3_percent": sum(error <= 0.03 for error in errors),
            "median_error": round(errors[len(errors) // 2], 4),
            "worst_error": round(errors[-1], 4),
        }
    return told


def main() -> None:
    """Record, replay, print, and write the results where asked."""
    parser = argparse.ArgumentParser(description="a what-if replay of the recorded policy")
    parser.add_argument(
        "--json", action="store_true", help="write benchmarks/results/self_replay.json"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    live, rows = Live(), []
    cells = [("goodput", kind, batch) for kind in KINDS for batch in BATCHES]
    print("policy  workload  tokens  same  repeated  recorded  fitted")
    for policy, kind, batch in [*cells, *((policy, *OTHERS_CELL) for policy in OTHERS)]:
        with TemporaryDirectory() as folder:
            trace = live.record(policy, kind, batch, Path(folder) / "trace")
            row = judge(trace, policy, f"{kind} x {batch}")
        rows.append(row)
        print(
            f"{row['policy']}  {row['workload']}  {row['tokens']}  {row['same_tokens']}  "
            f"{row['steps_repeated']}/{row['steps']}  {row['throughput_with_recorded_times']}  "
            f"{row['throughput_with_fitted_times'] or row['fitted_times_refused']}",
            flush=True,
        )
    found = summary(rows)
    print(found)
    if options.json:
        print(
            write_results("self_replay", "python -m benchmarks.self_replay --json", [found, *rows])
        )


if __name__ == "__main__":
    main()
