"""Arms on a recording, in simulated time: what the same requests would have taken.

Drafts achieve what the recording's acceptance table says, steps take what is fitted to its steps.
Nothing here is noisy, so the baseline's second run is its first. Knows traces; needs no model.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from sdcontrol.controller import Controller
from sdcontrol.core import BatchView, Confidence, Cost, Observation, Plan
from sdcontrol.errors import ConfigError
from sdcontrol.experiments.arm_planner import ArmPlanner
from sdcontrol.experiments.config import Arm, Experiment
from sdcontrol.experiments.machine import setting_of
from sdcontrol.experiments.meter import Meter
from sdcontrol.experiments.records import Place, RunRecord
from sdcontrol.experiments.runner import Outputs
from sdcontrol.experiments.samples import MOST_STEPS
from sdcontrol.experiments.workload import arrivals, dealt
from sdcontrol.experiments.workload_settings import ClosedLoop
from sdcontrol.outcomes import DEPTH
from sdcontrol.traces.bundled import trace_folder
from sdcontrol.traces.fitted_times import FittedTimes
from sdcontrol.traces.reader import Trace
from sdcontrol.traces.replay_result import ReplayResult
from sdcontrol.traces.simulate import Simulation, SimulationSettings
from sdcontrol.traces.what_if import settings_of, workload_of
from sdcontrol.traces.workload import SimulatedRequest, Workload

__all__ = ["TraceRunner"]


class TraceRunner:
    """A `Runner`. Raises `TraceError` and `CounterfactualError` for what the recording lacks."""

    def __init__(self, experiment: Experiment) -> None:
        assert experiment.workload.trace is not None  # the config has seen to that
        trace = Trace(trace_folder(experiment.workload.trace))
        self._experiment = experiment
        self._arms = {arm.name: arm for arm in experiment.arms}
        self._planners = {arm.name: _planner(experiment, arm, trace) for arm in experiment.arms}
        self._recorded: Sequence[SimulatedRequest] = tuple(workload_of(trace))
        self._times = FittedTimes.of(trace)
        self._settings = settings_of(trace)

    @property
    def place(self) -> Place:
        """Simulated, on this machine."""
        return Place(is_simulated=True, setting=setting_of(torch.device("cpu")))

    def run_block(self, arm: str, block: int, *, start_seconds: float) -> tuple[RunRecord, Outputs]:
        """Simulate the block's requests under an arm; there are no texts."""
        known = self._planners[arm]
        planner = known.begin(block)
        settings = self._settings_of(self._arms[arm])
        simulation = Simulation(self._workload(block), planner, self._times, settings)
        known.tell()
        num_blocks = self._experiment.blocks + self._experiment.warmup.max_blocks
        meter = Meter(
            most_steps=max(MOST_STEPS // num_blocks, 2),
            slo=self._experiment.slo,
            start_seconds=start_seconds,
        )
        while simulation.has_work:
            known.note(_step(simulation, meter))
        planner.block_ended()
        known.end(planner.num_before)
        result = simulation.measurements.result(policy=arm, workload=f"block {block}")
        if result.num_refused:
            raise ConfigError(result.refusals[0])
        _add_requests(meter, result)
        return meter.record(arm, seconds=result.seconds, forward=None, more={}), {}

    def close(self) -> None:
        """Nothing is held."""

    def _workload(self, block: int) -> Workload:
        taken = dealt(self._experiment, block, self._recorded)
        times = arrivals(self._experiment, block, [r.arrival_seconds for r in taken])
        requests = [
            replace(request, id=f"{block}.{place} {request.id}", arrival_seconds=time or 0.0)
            for place, (request, time) in enumerate(zip(taken, times, strict=True))
        ]
        found, rule = Workload.of(f"block {block}", requests), self._experiment.workload.arrivals
        return found.in_closed_loop(rule.concurrency) if isinstance(rule, ClosedLoop) else found

    def _settings_of(self, arm: Arm) -> SimulationSettings:
        """The recorded engine's, with what the file says otherwise."""
        said = _said(self._experiment, arm)
        given = {name: said[name] for name in said.keys() & SimulationSettings.model_fields.keys()}
        given["drafters"] = arm.drafters if self._planners[arm.name].planner.drafts else ()
        return self._settings.model_copy(update={k: v for k, v in given.items() if v is not None})


class _Continued:
    """A planner whose steps are numbered on from block to block."""

    def __init__(self, controller: Controller) -> None:
        self.policy = controller.policy
        self.drafts, self.learns = controller.drafts, controller.learns
        self.refines_hinted = controller.refines_hinted
        self.refines_between_rounds = controller.refines_between_rounds
        self._controller = controller
        self.pad_to, self.price_by = controller.pad_to, controller.price_by
        self.num_before = 0  # steps of earlier blocks
        self._shown: tuple[BatchView, BatchView] | None = None  # as it came, as it is shown

    @property
    def cost(self) -> Cost:
        """The controller's, which is another once it knows its machine."""
        return self._controller.cost

    def plan(self, view: BatchView) -> Plan:
        """The controller's."""
        return self._controller.plan(self._numbered(view))

    def refine(self, view: BatchView, plan: Plan, confidence: Confidence) -> Plan:
        """The controller's."""
        return self._controller.refine(self._numbered(view), plan, confidence)

    def observe(self, observation: Observation) -> None:
        """Tell the controller."""
        self._controller.observe(replace(observation, view=self._numbered(observation.view)))

    def take_faults(self) -> tuple[str, ...]:
        """The controller's."""
        return self._controller.take_faults()

    def block_ended(self) -> None:
        """The next step is the first of another block."""
        self.num_before = self._shown[1].step + 1 if self._shown else self.num_before
        self._shown = None

    def _numbered(self, view: BatchView) -> BatchView:
        if self._shown is None or self._shown[0] is not view:  # a belief belongs to one view
            self._shown = view, replace(view, step=view.step + self.num_before)
        return self._shown[1]


def _said(experiment: Experiment, arm: Arm) -> dict[str, Any]:
    """What the file says of an arm's engine."""
    said = experiment.engine.model_fields_set | arm.engine.model_fields_set
    engine = experiment.engine_of(arm)
    return {name: getattr(engine, name) for name in said}


def _planner(experiment: Experiment, arm: Arm, trace: Trace) -> ArmPlanner[_Continued]:
    recorded = trace.header.controller
    most = recorded.max_draft_tokens if recorded is not None else DEPTH
    most = _said(experiment, arm).get("max_draft_tokens", most)
    return ArmPlanner(
        arm.controller,
        lambda: Controller(arm.policy, seed=experiment.seed, max_draft_tokens=most, clock=None),
        _Continued,
    )


def _step(simulation: Simulation, meter: Meter) -> Observation:
    before = simulation.measurements.output_tokens
    observation = simulation.step()
    spent = observation.timing.total_seconds
    meter.step(
        observation,
        begun_seconds=simulation.clock_seconds - spent,
        measured_seconds=spent,
        emitted=simulation.measurements.output_tokens - before,  # those that end prompts too
        predicted_seconds=None,
    )
    return observation


def _add_requests(meter: Meter, result: ReplayResult) -> None:
    times = result.times
    columns = ("arrival_seconds", "ttft_seconds", "end_to_end_seconds", "output_tokens")
    for name, arrival, first, last, tokens in zip(
        times.ids, *(times[column] for column in columns), strict=True
    ):
        meter.arrive(name, float(arrival))
        meter.emit(name, 1, float(arrival + first))
        meter.emit(name, int(tokens) - 1, float(arrival + last))
