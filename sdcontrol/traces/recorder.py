"""A planner that writes down what another planner was shown, answered and told.

    engine = Engine(model, planner=Recorder(Controller("goodput"), "runs/monday"))

Everything that the planner's decisions depend on is recorded, so that they can be replayed exactly.
Works around any planner in any decode loop; an engine tells it of requests besides. Knows nothing of
engines or tensors. Should writing fail, the run goes on and the trace ends there.
"""

import atexit
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from sdcontrol.core import BatchView, Confidence, Observation, Plan, Planner
from sdcontrol.errors import TraceError
from sdcontrol.estimators.known_machine import KnownMachine
from sdcontrol.logs import EventLog
from sdcontrol.traces.decisions import Decisions
from sdcontrol.traces.facts import controller_facts, controller_in, facts_of
from sdcontrol.traces.schema import RequestRecord, TraceFacts
from sdcontrol.traces.writer import TraceWriter

__all__ = ["Recorder"]

_log = EventLog(__name__)


@dataclass(slots=True)
class _Live:
    """A request that has not ended, as far as it is known."""

    arrival: RequestRecord  # what was known at its beginning
    is_told: bool  # by `request_arrived`; else seen in a view
    output_tokens: int = 0
    ttft_seconds: float | None = None
    output_ids: list[int] = field(default_factory=list)

    def record(self, finish_reason: str | None, end_seconds: float | None) -> RequestRecord:
        """What is known in the end."""
        return replace(
            self.arrival,
            output_tokens=self.output_tokens,
            ttft_seconds=self.ttft_seconds,
            finish_reason=finish_reason,
            end_seconds=end_seconds,
            output_ids=None if self.arrival.prompt_ids is None else tuple(self.output_ids),
        )


class Recorder:
    """Records what `planner` does into a new folder.

    Token ids of prompts and outputs are kept only with `keep_token_ids`. Close it, or use it in a
    `with`. Raises `TraceError` where nothing can be recorded there.
    """

    def __init__(
        self,
        planner: Planner,
        path: Path | str,
        *,
        keep_token_ids: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._facts, files = facts_of(planner)
        self._planner = planner
        self._writer = TraceWriter(path, self._facts, keep=files)
        self._keep_token_ids = keep_token_ids
        self._clock, self._origin = clock, clock()
        self._is_recording, self._has_begun = True, False
        self._observe_seconds = 0.0  # of the last step
        self._live: dict[str, _Live] = {}
        self._ended: set[str] = set()  # in this step
        self._faults: list[str] = []  # the planner's, until somebody takes them
        self._decisions = Decisions()
        atexit.register(self.close)  # for those who forget to: before the writer closes itself

    def describe(self, facts: TraceFacts) -> None:
        """Say what is run: models, drafters, settings. Policy and controller stay as they are."""
        self._try(lambda: self._describe(facts.model_copy(update={"policy": self._facts.policy})))

    # the planner
    def pad_to(self, token_edges: Sequence[int]) -> None:
        """Tell the planner to what forwards are padded, and keep it: prices depend on it."""
        self._tell("pad_to", token_edges)

    def draft_at_most(self, max_draft_tokens: int) -> None:
        """Tell the planner how long drafts may be, and keep it: choices depend on it."""
        self._tell("draft_at_most", max_draft_tokens)

    def runs_on(self, device: str, *told: object) -> None:
        """Tell the planner what runs on which device, and keep what it makes of that: prices start from it."""
        self._tell("runs_on", device, *told)

    def price_by(self, machine: KnownMachine) -> None:
        """The same of a machine that is known already, as a simulation tells it."""
        self._tell("price_by", machine)

    def goes_ahead(self) -> None:
        """Tell the planner that steps may be launched ahead of their tokens, and keep it: prices depend on it."""
        self._tell("goes_ahead")

    def _tell(self, name: str, *told: object) -> None:
        """Pass on what an engine says, and write down what a controller makes of it."""
        tell = getattr(self._planner, name, None)
        if tell is None:
            return
        tell(*told)
        if self._is_recording and self._facts.controller is not None:
            self._try(lambda: self._describe(self._facts))

    def _describe(self, facts: TraceFacts) -> None:
        """Write them down; of the controller what it is now, and observed before the first recorded step."""
        before, controller = self._facts.controller, controller_in(self._planner)
        if before is not None and controller is not None:
            now = controller_facts(controller)
            kept = {"steps_before": before.steps_before} if self._has_begun else {}
            before = now.model_copy(update=kept)
        self._facts = facts.model_copy(update={"controller": before})
        self._writer.describe(self._facts)

    @property
    def drafts(self) -> bool:
        """Whether a plan may ever have drafts."""
        return bool(getattr(self._planner, "drafts", True))

    @property
    def learns(self) -> bool:
        """Whether the planner wants to know how free drafters would have done."""
        return bool(getattr(self._planner, "learns", True))

    @property
    def allows_late_observations(self) -> bool:
        """Whether it may be asked for a plan before it is told what came of the one before."""
        return bool(getattr(self._planner, "allows_late_observations", False))

    @property
    def plans_ahead(self) -> bool:
        """Whether it may be asked before the last step's tokens are known."""
        return bool(getattr(self._planner, "plans_ahead", False))

    @property
    def refines(self) -> bool:
        """Whether the planner ever shortens what was drafted."""
        return bool(getattr(self._planner, "refines", True))

    @property
    def refines_between_rounds(self) -> bool:
        """Whether it wants to be asked after every round."""
        return bool(getattr(self._planner, "refines_between_rounds", True))

    @property
    def refines_hinted(self) -> bool:
        """Whether it wants to be asked about drafts of which a hint had said all."""
        return bool(getattr(self._planner, "refines_hinted", True))

    def heeds(self, plan: Plan) -> bool:
        """Whether confidences could change `plan`."""
        return bool(getattr(self._planner, "heeds", lambda _: True)(plan))

    def plan(self, view: BatchView) -> Plan:
        """The planner's plan."""
        self._collect_faults()
        plan = self._planner.plan(view)
        self._decisions.planned(view, plan, self._collect_faults(), self._now())
        return plan

    def refine(self, view: BatchView, plan: Plan, confidence: Confidence) -> Plan:
        """The planner's shorter plan."""
        refined = self._planner.refine(view, plan, confidence)
        self._decisions.refined(view, plan, confidence, refined)
        return refined

    def observe(self, observation: Observation) -> None:
        """Tell the planner, and write it down. Faults that nobody collected are added.

        Raises `ObservationError` for what cannot have come about; the step can be told again.
        """
        observation.check()
        uncollected = self.take_faults()
        if uncollected:
            observation = replace(observation, faults=(*observation.faults, *uncollected))
        now, self._has_begun = self._now(), True
        try:
            self._planner.observe(observation)
        finally:
            self._record(observation, now)
            self._observe_seconds = self._now() - now

    def take_faults(self) -> tuple[str, ...]:
        """The planner's faults since the last call."""
        self._collect_faults()
        faults, self._faults = tuple(self._faults), []
        return faults

    def _collect_faults(self) -> tuple[str, ...]:
        new: tuple[str, ...] = getattr(self._planner, "take_faults", tuple)()
        self._faults.extend(new)
        return new

    # requests: an engine calls these
    def request_arrived(
        self,
        request_id: str,
        *,
        prompt: Sequence[int],
        max_new_tokens: int,
        temperature: float,
        seed: int,
    ) -> None:
        """A request was submitted."""
        record = RequestRecord(
            id=request_id,
            arrival_seconds=self._now(),
            prompt_tokens=len(prompt),
            output_tokens=0,
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            seed=(seed + 2**63) % 2**64 - 2**63,  # torch's has 64 bits, and no sign
            prompt_ids=tuple(prompt) if self._keep_token_ids else None,
        )
        self._live[request_id] = _Live(record, is_told=True)

    def tokens_emitted(
        self, request_id: str, tokens: Sequence[int], finish_reason: str | None
    ) -> None:
        """A step gave a request tokens, or ended it."""
        live = self._live.get(request_id)
        if live is None:
            return
        if tokens and live.ttft_seconds is None:
            live.ttft_seconds = self._now() - live.arrival.arrival_seconds
        live.output_tokens += len(tokens)
        if self._keep_token_ids:
            live.output_ids.extend(tokens)
        if finish_reason is not None:
            self._ended.add(request_id)
            self._write_request(self._live.pop(request_id).record(finish_reason, self._now()))

    def close(self) -> None:
        """Finish the trace; requests that have not ended are recorded as far as they came."""
        for live in self._live.values():
            self._write_request(live.record(None, None))
        self._live.clear()
        self._is_recording = False
        atexit.unregister(self.close)
        self._writer.close()

    def discard(self) -> None:
        """Delete the trace: the run never began."""
        self._is_recording = False
        atexit.unregister(self.close)
        self._writer.discard()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # writing
    def _record(self, observation: Observation, now: float) -> None:
        step = self._decisions.close(observation, now, self._observe_seconds)
        self._note_strangers(observation, step.start_seconds)
        if self._is_recording:
            self._try(lambda: self._writer.append(step))

    def _note_strangers(self, observation: Observation, start_seconds: float) -> None:
        """Of requests that nobody told of, the views say what there is to know."""
        for row, request in enumerate(observation.view.requests):
            live = self._live.get(request.id)
            if live is None and request.id not in self._ended:
                record = RequestRecord(
                    id=request.id,
                    arrival_seconds=start_seconds,
                    prompt_tokens=max(request.context_tokens - request.generated_tokens, 0),
                    output_tokens=0,
                    temperature=request.temperature,
                )
                live = self._live[request.id] = _Live(record, is_told=False)
            if live is not None and not live.is_told:
                live.output_tokens = request.generated_tokens + observation.emitted[row]
        self._ended.clear()

    def _write_request(self, record: RequestRecord) -> None:
        if self._is_recording:
            self._try(lambda: self._writer.add_request(record))

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
        except TraceError as error:
            self._is_recording = False
            _log.warning("recording_stopped", reason=str(error))

    def _now(self) -> float:
        return self._clock() - self._origin
