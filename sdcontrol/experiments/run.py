"""Run a comparison block by block until its rule says that it is enough.

Knows the order of things: schedule, runner, folder, verdict. A block counts when its file is
written; what an interruption cuts short is run again, with the same order and seeds.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from sdcontrol.errors import SdcontrolError
from sdcontrol.experiments.config import Experiment
from sdcontrol.experiments.judge import counted, decide
from sdcontrol.experiments.records import BlockRecord, RunRecord
from sdcontrol.experiments.results import Difference, Results
from sdcontrol.experiments.runner import Outputs, Runner
from sdcontrol.experiments.schedule import is_warmup, turns
from sdcontrol.experiments.store import RunFolder
from sdcontrol.experiments.summary import summarise
from sdcontrol.interrupts import raise_interrupt
from sdcontrol.logs import EventLog

__all__ = ["Silent", "Watcher", "run_experiment"]

_log = EventLog(__name__)


class Watcher(Protocol):
    """Is told how far a run is."""

    def turn(self, label: str, *, share: float, left_seconds: float) -> None:
        """An arm begins; `share` of the run is done, at most `left_seconds` are left (NaN:
        unknown)."""
        ...


class Silent:
    """Shows nothing."""

    def turn(self, label: str, *, share: float, left_seconds: float) -> None:
        """Ignore it."""


def run_experiment(
    experiment: Experiment,
    runner: Runner,
    folder: RunFolder,
    watcher: Watcher | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> Results:
    """Run what is left to run; results of all finished blocks, also where Ctrl-C cut it short.

    `clock` (seconds) tells how much time is left, and nothing else: what is measured has its own.
    An arm that fails ends alone. Raises `ConfigError` where the folder holds damaged blocks, or another
    process runs in it.
    """
    with folder.alone():
        return _run(experiment, runner, folder, watcher or Silent(), clock)


def _run(
    experiment: Experiment,
    runner: Runner,
    folder: RunFolder,
    watcher: Watcher,
    clock: Callable[[], float],
) -> Results:
    folder.begin()
    blocks, here = folder.blocks(), runner.place
    place = (folder.place() if blocks else None) or here
    folder.set_place(place)
    pace = _Pace(experiment, watcher, blocks, clock)
    flush = _Flush(lambda done: folder.write_results(summarise(experiment, done, place)))
    interrupted = False
    try:
        if blocks and not decide(experiment, blocks).is_done:
            _catch_up(experiment, runner, blocks, pace)
        while not decide(experiment, blocks).is_done:
            record = _run_block(experiment, runner, blocks, pace)
            if here.setting not in place.settings:
                place = place.going_on(here)
                folder.set_place(place)
            folder.add_block(record)
            blocks.append(record)
            flush.maybe(blocks)
            pace.block_ended()
    except KeyboardInterrupt:
        interrupted = True
    results = summarise(experiment, blocks, place, interrupted=interrupted)
    folder.write_results(results)
    return results


class _Pace:
    """How long blocks take, and so how much is left."""

    def __init__(
        self,
        experiment: Experiment,
        watcher: Watcher,
        blocks: Sequence[BlockRecord],
        clock: Callable[[], float],
    ) -> None:
        self._clock = clock
        self._experiment = experiment
        self._watcher = watcher
        self._blocks = blocks  # grows meanwhile
        self._num_before = len(blocks)
        self._started = self._block_started = clock()

    def turn(self, label: str, within: float) -> None:
        """A turn begins after `within` of the block's turns."""
        done = len(self._blocks)
        num_warmup = done - len(counted(self._blocks))
        planned = self._experiment.blocks + max(num_warmup, self._experiment.warmup.min_blocks)
        left = max(planned - done - within, 0.0)
        ran = done - self._num_before
        each = (self._block_started - self._started) / ran if ran else math.nan
        self._watcher.turn(label, share=(done + within) / planned, left_seconds=each * left)

    def block_ended(self) -> None:
        """One more."""
        self._block_started = self._clock()

    def restart(self) -> None:
        """What was before is no measure."""
        self._started = self._block_started = self._clock()


class _Flush:
    """Results after a block, unless making them would take a tenth of the time."""

    def __init__(self, write: Callable[[Sequence[BlockRecord]], None]) -> None:
        self._write = write
        self._ended, self._took = -math.inf, 0.0

    def maybe(self, blocks: Sequence[BlockRecord]) -> None:
        """Blocks are safe in their own files; this is for whoever looks in meanwhile."""
        started = time.monotonic()
        if started - self._ended >= 9.0 * self._took:
            self._write(blocks)
            self._ended = time.monotonic()
            self._took = self._ended - started


def _catch_up(
    experiment: Experiment, runner: Runner, blocks: Sequence[BlockRecord], pace: _Pace
) -> None:
    """After an interruption, unrecorded: live, the first block again, so that all is warm;
    simulated, all of them, after which controllers know what they knew."""
    again = [(arm, 0) for arm in _alive(experiment, blocks)]
    if runner.place.is_simulated:
        again = [(run.arm, block.block) for block in blocks for run in block.runs]
    for arm, block in again:
        pace.turn(f"warming {arm}", 0.0)
        try:
            runner.run_block(arm, block, start_seconds=0.0)
        except Exception as error:  # it will fail again where it counts
            raise_interrupt(error)
            _log.warning("arm_failed", arm=arm, error=str(error))
    pace.restart()


def _run_block(
    experiment: Experiment, runner: Runner, blocks: Sequence[BlockRecord], pace: _Pace
) -> BlockRecord:
    number, alive = len(blocks), _alive(experiment, blocks)
    now = _clock(blocks)
    runs: list[RunRecord] = []
    outputs: dict[str, Outputs] = {}
    order = [turn for turn in turns(experiment, blocks) if turn[0] in alive]
    for place, (arm, is_repeat) in enumerate(order):
        pace.turn(f"block {number}, {arm}", place / len(order))
        run, texts = _run_arm(runner, arm, number, now)
        runs.append(run.model_copy(update={"is_repeat": is_repeat}))
        now += run.seconds
        if not run.failed:
            outputs.setdefault(arm, texts)
    num_texts, differences = _compare_texts(outputs, experiment.reference)
    return BlockRecord(
        block=number,
        is_warmup=is_warmup(experiment, blocks, runs),
        runs=tuple(runs),
        num_texts=num_texts,
        differences=differences,
    )


def _run_arm(runner: Runner, arm: str, block: int, now: float) -> tuple[RunRecord, Outputs]:
    try:
        return runner.run_block(arm, block, start_seconds=now)
    except Exception as error:
        raise_interrupt(error)
        _log.warning("arm_failed", arm=arm, block=block, error=str(error))
        text = " ".join(str(error).split())
        kind = "" if isinstance(error, SdcontrolError) else f"{type(error).__name__}: "
        return RunRecord(arm=arm, start_seconds=now, failed=f"block {block}: {kind}{text}"), {}


def _alive(experiment: Experiment, blocks: Sequence[BlockRecord]) -> list[str]:
    failed = {run.arm for block in blocks for run in block.runs if run.failed}
    return [arm.name for arm in experiment.arms if arm.name not in failed]


def _clock(blocks: Sequence[BlockRecord]) -> float:
    """The run's time so far, pauses left out."""
    return max((run.start_seconds + run.seconds for b in blocks for run in b.runs), default=0.0)


def _compare_texts(
    outputs: Mapping[str, Outputs], baseline: str
) -> tuple[int, tuple[Difference, ...]]:
    """How many texts were compared with the baseline's, and where they first differ."""
    reference = outputs.get(baseline, {})
    compared, differences = 0, []
    for arm, texts in outputs.items():
        if arm == baseline:
            continue
        for request in reference.keys() & texts.keys():
            compared += 1
            mine, theirs = texts[request], reference[request]
            if mine != theirs:
                same = (a == b for a, b in zip(mine, theirs, strict=False))
                position = next((at for at, is_same in enumerate(same) if not is_same), None)
                at = min(len(mine), len(theirs)) if position is None else position
                differences.append(Difference(arm=arm, request=request, position=at))
    return compared, tuple(sorted(differences, key=lambda found: (found.request, found.arm)))
