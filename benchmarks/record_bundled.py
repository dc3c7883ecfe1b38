"""Record the small traces that come with the package: the bundled models under every policy.

    python -m benchmarks.record_bundled [--output FOLDER]

To be run again whenever a policy or an estimator is changed on purpose: the traces are the
controller's regression test, and an older one holds the decisions of the older controller.
"""

import argparse
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from sdcontrol.controller import Controller
from sdcontrol.engine.bundled import KINDS, held_out_prompts, load_bundled, load_bundled_tokenizer
from sdcontrol.engine.config import EngineConfig
from sdcontrol.engine.drafters.build import DrafterSpec
from sdcontrol.engine.loop import Engine
from sdcontrol.engine.request import Request
from sdcontrol.integrations.acceptance import add_acceptance_table
from sdcontrol.integrations.recording import facts_of_run
from sdcontrol.policies.learned_model import save, train
from sdcontrol.traces import bundled
from sdcontrol.traces.reader import Trace
from sdcontrol.traces.recorder import Recorder
from sdcontrol.traces.replay import ReplayReport, replay_exactly

__all__ = ["main"]

_ONE_DRAFTER = ("smartspec", "ema_steps", "budget_argmax", "heuristic", "concurrency_schedule")
_STEPS_BETWEEN_ARRIVALS = 5


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
    torch.set_num_threads(1)
    is_exact = True
    with TemporaryDirectory() as folder:
        for run in _runs(output, Path(folder)):
            shutil.rmtree(output / run.name, ignore_errors=True)
            report = _record(run, output / run.name)
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
    save(train(list(Trace(output / mixed.name).observations())), scratch / "policy.skops")
    yield _Run("learned", {"kind": "learned", "model": scratch / "policy.skops"})


def _record(run: _Run, path: Path) -> ReplayReport:
    target, draft = (load_bundled(name, dtype=torch.float32) for name in ("target", "draft"))
    drafters: list[DrafterSpec] = ["ngram", "sparse_kv:128", draft]
    config = EngineConfig(max_batch_size=8, max_prefill_tokens=128, kv_tokens=1 << 15)
    controller = Controller(run.policy)
    with Recorder(controller, path, keep_token_ids=run.keep_token_ids) as recorder:
        engine = Engine(target, drafters=drafters, planner=recorder, config=config)
        recorder.describe(facts_of_run(engine, drafters))
        requests = _decode(engine, run)
        engine.close()
    if run.has_acceptance_table:
        add_acceptance_table(path, target, drafters, requests, config=config)
    return replay_exactly(path)


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
