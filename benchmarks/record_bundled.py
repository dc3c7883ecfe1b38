"""Record the small traces that come with the package: the bundled models under every policy.

    python -m benchmarks.record_bundled [--output FOLDER]

To be run again whenever a policy or an estimator is changed on purpose: the traces are the
controller's regression test, and an older one holds the decisions of the older controller. A trace
for what-if replays has to hold drafts of every drafter, whose times are fitted to it; what `goodput`
tries out depends on what it measures, so such a run is repeated until it does, nine times at most. A trace takes
the place of its predecessor when it is done. Nothing is recorded beside programs that take the core
away: of such steps no times can be fitted.
"""

import argparse
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from sdcontrol.controller import Controller
from sdcontrol.core import family_of
from sdcontrol.engine.bundled import KINDS, held_out_prompts, load_bundled, load_bundled_tokenizer
from sdcontrol.engine.config import EngineConfig
from sdcontrol.engine.drafters.build import DrafterSpec
from sdcontrol.engine.loop import Engine
from sdcontrol.engine.request import Request
from sdcontrol.errors import TraceError
from sdcontrol.integrations.acceptance import add_acceptance_table
from sdcontrol.integrations.recording import facts_of_run
from sdcontrol.policies.learned_model import fit, save
from sdcontrol.traces import bundled
from sdcontrol.traces.drawn import drawn_runs
from sdcontrol.traces.reader import Trace
from sdcontrol.traces.recorder import Recorder
from sdcontrol.traces.replay import ReplayReport, replay_exactly

__all__ = ["main", "record_with_all_drafters", "unused_families"]

_ONE_DRAFTER = (
    "smartspec",
    "ema_steps",
    "throughput_aware",
    "budget_argmax",
    "heuristic",
    "concurrency_schedule",
)
_STEPS_BETWEEN_ARRIVALS = 5
_MOST_TRIES = 9
_LEAST_SHARE = 0.95  # of the time on the core


@dataclass(frozen=True, slots=True)
class _Run:
    """What is decoded for one trace."""

    name: str
    policy: str | Mapping[str, object]
    requests_per_kind: int = 1
    max_new_tokens: int = 24
    keep_token_ids: bool = False
    has_acceptance_table: bool = False


def main(arguments: Sequence[str] | None = None) -> int:
    """Record every trace and replay it; 0 if all replay exactly."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    default = Path(bundled.__file__).parent
    parser.add_argument("--output", type=Path, default=default, help="where the traces go")
    output = parser.parse_args(arguments).output
    output.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    is_exact = True
    with TemporaryDirectory() as folder:
        for run in _runs(output, Path(folder)):
            try:
                report = _record(run, Path(folder) / run.name)
            except TraceError as error:
                print(f"{run.name}: {error}; {output / run.name} is as it was", file=sys.stderr)
                return 1
            shutil.rmtree(output / run.name, ignore_errors=True)
            shutil.move(Path(folder) / run.name, output / run.name)
            is_exact = is_exact and report.is_exact
            print(f"{run.name}: {report}")
    return 0 if is_exact else 1


def _runs(output: Path, scratch: Path) -> Iterator[_Run]:
    mixed = _Run(
        "mixed",
        "goodput",
        requests_per_kind=3,
        max_new_tokens=80,
        keep_token_ids=True,
        has_acceptance_table=True,
    )
    yield mixed
    yield _Run("off", "off")
    yield _Run("static", "static:draft_model:3")
    yield _Run("roofline", "roofline")
    for kind in _ONE_DRAFTER:
        yield _Run(kind, {"kind": kind, "drafter": "draft_model"})
    trace = Trace(output / mixed.name)
    save(fit([list(trace.observations())], drawn=[drawn_runs(trace)]), scratch / "policy.skops")
    yield _Run("learned", {"kind": "learned", "model": scratch / "policy.skops"})


def _record(run: _Run, path: Path) -> ReplayReport:
    target, draft = (load_bundled(name, dtype=torch.float32) for name in ("target", "draft"))
    drafters: list[DrafterSpec] = ["ngram", "sparse_kv:128", draft]
    config = EngineConfig(max_batch_size=8, max_prefill_tokens=128, kv_tokens=1 << 15)

    def record() -> list[Request]:
        recorder = Recorder(Controller(run.policy), path, keep_token_ids=run.keep_token_ids)
        with recorder:
            engine = Engine(target, drafters=drafters, planner=recorder, config=config)
            recorder.describe(facts_of_run(engine, drafters))
            began = time.perf_counter(), time.process_time()
            requests = _decode(engine, run)
            share = (time.process_time() - began[1]) / (time.perf_counter() - began[0])
            engine.close()
        if share < _LEAST_SHARE:
            raise TraceError(
                f"the process had the core for {share:.0%} of the time, at least {_LEAST_SHARE:.0%} is "
                "needed; stop other programs"
            )
        return requests

    if run.has_acceptance_table:
        requests = record_with_all_drafters(record, path)
        add_acceptance_table(path, target, drafters, requests, config=config)
    else:
        record()
    return replay_exactly(path)


def record_with_all_drafters(record: Callable[[], list[Request]], path: Path) -> list[Request]:
    """Call `record`, which writes a trace to `path`, until every drafter is used in it.

    What it answered the last time. Raises `TraceError`, and leaves no trace, after nine tries.
    """
    unused: list[str] = []
    for _ in range(_MOST_TRIES):
        requests = record()
        unused = unused_families(path)
        if not unused:
            return requests
        shutil.rmtree(path)
    raise TraceError(
        f"no draft of {unused} in the last of {_MOST_TRIES} recordings, so that what-if replays "
        "could not tell what it takes; record more or longer requests"
    )


def unused_families(path: Path) -> list[str]:
    """The drafters that a trace offers and never uses."""
    trace = Trace(path)
    unused = dict.fromkeys(family_of(arm) for arm in trace.header.drafters)
    for seen in trace.observations():
        for choice, drafted in zip(seen.plan.choices, seen.drafted, strict=True):
            if choice.drafter is not None and drafted:
                unused.pop(family_of(choice.drafter), None)
    return [*unused]


def _decode(engine: Engine, run: _Run) -> list[Request]:
    """Requests of every kind, one after another; half of them sampled."""
    tokenizer = load_bundled_tokenizer()
    waiting = [
        list(tokenizer(prompt)["input_ids"])
        for place in range(run.requests_per_kind)
        for kind in KINDS
        for prompt in held_out_prompts(kind, 1, seed=place)
    ][::-1]
    num_steps = num_submitted = 0
    submitted: list[Request] = []
    while waiting or engine.has_work:
        if waiting and num_steps >= num_submitted * _STEPS_BETWEEN_ARRIVALS:
            name = engine.submit(
                waiting.pop(),
                seed=num_submitted,
                do_sample=num_submitted % 2 == 1,
                max_new_tokens=run.max_new_tokens,
            )
            submitted.append(engine.requests[name])
            num_submitted += 1
        engine.step()
        engine.take_events()
        num_steps += 1
    return submitted


if __name__ == "__main__":
    raise SystemExit(main())
