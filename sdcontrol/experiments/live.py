"""Arms on the real engine, one model for all of them.

Every run of a block has an engine of its own, so that no arm, and no repeat, finds prompts in the
cache that another left; the planner of an arm is kept, unless it says otherwise. Time is that of the
engine's steps: what the measuring itself takes is left out, and where an open loop has nothing to
do its clock jumps to the next arrival.
"""

import gc
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from sdcontrol.controller import Controller
from sdcontrol.core import Planner
from sdcontrol.engine.config import EngineConfig
from sdcontrol.engine.drafters.build import DrafterSpec
from sdcontrol.engine.loop import Engine
from sdcontrol.errors import ConfigError
from sdcontrol.estimators.cost import Prediction
from sdcontrol.estimators.hardware import Hardware
from sdcontrol.estimators.roofline import Forward
from sdcontrol.estimators.shapes import from_config
from sdcontrol.experiments.arm_planner import ArmPlanner
from sdcontrol.experiments.config import Arm, Experiment
from sdcontrol.experiments.machine import PeakMemory, setting_of
from sdcontrol.experiments.meter import Meter
from sdcontrol.experiments.records import Place, RunRecord
from sdcontrol.experiments.results import Roofline
from sdcontrol.experiments.runner import Outputs
from sdcontrol.experiments.samples import MOST_STEPS
from sdcontrol.experiments.workload import WorkItem, block_items, check_files
from sdcontrol.experiments.workload_settings import ClosedLoop

__all__ = ["LiveRunner", "Models"]

_MOST_KV_TOKENS = 1 << 18
_SPARE_TOKENS = 80  # of a request, for drafts and the rest of its last block


@dataclass(frozen=True, slots=True)
class Models:
    """What decodes. `encode` turns a prompt into token ids; `hardware` None: no roofline."""

    target: PreTrainedModel
    draft: PreTrainedModel | None
    encode: Callable[[str], Sequence[int]]
    hardware: Hardware | None = None


class LiveRunner:
    """A `Runner`. `wrap` puts something between an arm's engine and its planner.

    Raises `ConfigError` where an arm wants a draft model that there is none of, or for files.
    """

    def __init__(
        self,
        experiment: Experiment,
        models: Models,
        *,
        wrap: Callable[[str, Planner], Planner] | None = None,
    ) -> None:
        check_files(experiment)
        self._experiment = experiment
        self._models = models
        self._arms = {arm.name: arm for arm in experiment.arms}
        self._planners = {arm.name: _planner(arm, experiment, wrap) for arm in experiment.arms}
        self._forward = _forward(models)
        for arm in experiment.arms:
            if "draft_model" in arm.drafters and models.draft is None:
                raise ConfigError(
                    f"arm {arm.name!r} drafts with draft_model and there is none; set draft_model"
                )

    @property
    def place(self) -> Place:
        """This machine."""
        return Place(
            is_simulated=False,
            setting=setting_of(self._models.target.device),
            roofline=_roofline(self._models.hardware),
        )

    def run_block(self, arm: str, block: int, *, start_seconds: float) -> tuple[RunRecord, Outputs]:
        """Decode the block's requests with an arm, in an engine of its own."""
        items = block_items(self._experiment, block, self._models.encode)
        num_blocks = self._experiment.blocks + self._experiment.warmup.max_blocks
        meter = Meter(
            most_steps=max(MOST_STEPS // num_blocks, 2),
            slo=self._experiment.slo,
            start_seconds=start_seconds,
        )
        gc.collect()
        planner = self._planners[arm]
        with self._engine(self._arms[arm], planner.begin(block), items) as engine:
            planner.tell()
            engine.stats.steps = planner.num_steps
            peak = PeakMemory(self._models.target.device)
            drive = _Drive(engine, planner, meter, self._experiment)
            outputs = drive.run(items)
            planner.end(engine.stats.steps)
            more = peak.metric()
        record = meter.record(arm, seconds=drive.now, forward=self._forward, more=more)
        return record, outputs

    def close(self) -> None:
        """Nothing is held."""

    def _engine(self, arm: Arm, planner: Planner, items: Sequence[WorkItem]) -> Engine:
        config = self._experiment.engine_of(arm)
        drafters: list[DrafterSpec] = [
            self._models.draft if name == "draft_model" and self._models.draft else name
            for name in arm.drafters
        ]
        return Engine(
            self._models.target,
            drafters=drafters,
            planner=planner,
            verification=arm.verification,
            config=config if config.kv_tokens else _with_cache(config, items, self._experiment),
        )


class _Drive:
    """Feeds an engine with requests when they are due, and a meter with what it does."""

    def __init__(
        self, engine: Engine, planner: ArmPlanner[Planner], meter: Meter, experiment: Experiment
    ) -> None:
        self._engine = engine
        self._planner = planner
        self._meter = meter
        self._options = _sampling(experiment)
        arrivals = experiment.workload.arrivals
        self._most = arrivals.concurrency if isinstance(arrivals, ClosedLoop) else None
        self.now = 0.0

    def run(self, items: Sequence[WorkItem]) -> dict[str, tuple[int, ...]]:
        """Output tokens by request."""
        outputs: dict[str, list[int]] = {item.name: [] for item in items}
        waiting = deque(items)
        while waiting or self._engine.has_work:
            self._submit(waiting)
            started = time.perf_counter()
            observation = self._engine.step()
            spent = time.perf_counter() - started
            self._planner.note(observation)
            begun, self.now = self.now, self.now + spent
            emitted = 0
            for event in self._engine.take_events():
                outputs[event.request_id].extend(event.tokens)
                self._meter.emit(event.request_id, len(event.tokens), self.now)
                emitted += len(event.tokens)
            self._meter.step(
                observation,
                begun_seconds=begun,
                measured_seconds=spent,
                emitted=emitted,
                predicted_seconds=self._predicted(observation.timing.total_seconds),
            )
        return {name: tuple(tokens) for name, tokens in outputs.items()}

    def _submit(self, waiting: "deque[WorkItem]") -> None:
        if waiting and not self._engine.has_work and waiting[0].arrival_seconds is not None:
            self.now = max(self.now, waiting[0].arrival_seconds)  # nothing to do until then
        while waiting and self._is_due(waiting[0]):
            item = waiting.popleft()
            arrival = self.now if item.arrival_seconds is None else item.arrival_seconds
            self._meter.arrive(item.name, arrival)
            submit: Callable[..., str] = self._engine.submit
            submit(item.prompt, request_id=item.name, seed=item.seed, **self._options)

    def _is_due(self, item: WorkItem) -> bool:
        if item.arrival_seconds is not None:
            return item.arrival_seconds <= self.now
        return self._most is None or len(self._engine.requests) < self._most

    def _predicted(self, measured_seconds: float) -> float | None:
        """What the planner expected of the step that it has just learned from."""
        cost = getattr(self._planner.planner, "cost", None)
        prediction = getattr(cost, "last_prediction", None)
        if not isinstance(prediction, Prediction):
            return None
        is_this = prediction.measured_seconds == measured_seconds
        return prediction.predicted_seconds if is_this else None


def _planner(
    arm: Arm, experiment: Experiment, wrap: Callable[[str, Planner], Planner] | None
) -> ArmPlanner[Planner]:
    most = experiment.engine_of(arm).max_draft_tokens
    return ArmPlanner(
        arm.controller,
        lambda: Controller(arm.policy, seed=experiment.seed, max_draft_tokens=most),
        lambda controller: wrap(arm.name, controller) if wrap else controller,
    )


def _sampling(experiment: Experiment) -> dict[str, object]:
    sampling = experiment.workload.sampling
    options: dict[str, object] = {"max_new_tokens": experiment.workload.num_tokens}
    if not sampling.temperature:
        return {**options, "do_sample": False}
    given = {"top_k": sampling.top_k or 0, "top_p": sampling.top_p or 1.0}
    return {**options, "do_sample": True, "temperature": sampling.temperature, **given}


def _with_cache(
    config: EngineConfig, items: Sequence[WorkItem], experiment: Experiment
) -> EngineConfig:
    """Room for all that may run at once: alike for every arm, however much memory is free."""
    arrivals = experiment.workload.arrivals
    together = arrivals.concurrency if isinstance(arrivals, ClosedLoop) else len(items)
    together = min(together, config.max_batch_size, len(items))
    longest = max(len(item.prompt) for item in items) + experiment.workload.num_tokens
    wanted = together * (longest + _SPARE_TOKENS)
    return config.model_copy(update={"kv_tokens": min(wanted, _MOST_KV_TOKENS)})


def _forward(models: Models) -> Forward | None:
    if models.hardware is None:
        return None
    settings = {**models.target.config.to_dict(), "dtype": str(models.target.dtype)}
    try:
        return Forward(from_config(settings), models.hardware)
    except ConfigError:  # an attention that nobody can price; all else is measured
        return None


def _roofline(hardware: Hardware | None) -> Roofline | None:
    if hardware is None:
        return None
    return Roofline(
        peak_flops_per_second=hardware.flops_per_second,
        bandwidth_bytes_per_second=hardware.bytes_per_second,
        ridge=hardware.ridge_flops_per_byte,
        source=hardware.name,
    )
