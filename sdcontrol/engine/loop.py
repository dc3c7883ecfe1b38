"""The engine: continuous batching in which every request may draft differently at every step.

    view -> plan -> propose -> verify -> commit -> observe
    |------- launch -------|   |----- land ------| learn

Three orders of that, one text. The plain loop learns from a step before it launches the next. The
overlapped one launches first: learning, and all that the caller does between two steps, such as
detokenising, takes place while the device computes. A plan has then seen one observation less. Where
nobody drafts, nor is likely to, a step is launched ahead: before the last one has landed, whose
tokens go from verdicts to inputs on the device.

What a step consists of stands in `steps`.
"""

from dataclasses import replace
from typing import Self

import torch
from transformers import PreTrainedTokenizerBase

from sdcontrol.core import Observation, Planner
from sdcontrol.engine.backends import device_scope
from sdcontrol.engine.batch import Batch
from sdcontrol.engine.config import EngineConfig
from sdcontrol.engine.drafters.build import DrafterSpecs
from sdcontrol.engine.flight import Flight
from sdcontrol.engine.request import Request
from sdcontrol.engine.steps import EngineSteps
from sdcontrol.engine.verify import Asked, Verifier
from sdcontrol.errors import EngineClosed

__all__ = ["Engine"]


class Engine(EngineSteps):
    """Decodes many requests of one model together, with any mix of drafters.

    `drafters` are names (`"ngram"`, `"sparse_kv:512"`), draft model objects, `Drafter` objects: one,
    a list, or a mapping from arm names to those. Without a `planner` nothing is drafted. `submit` and `cancel`
    may be called from any thread while one thread steps.

    Raises `UnsupportedModel` for what the attention path cannot honour, `ConfigError` for settings.
    """

    def __init__(
        self,
        model: object,
        *,
        drafters: DrafterSpecs = (),
        planner: Planner | None = None,
        verification: str | Verifier = "coupled",
        tokenizer: PreTrainedTokenizerBase | None = None,
        config: EngineConfig | None = None,
    ) -> None:
        super().__init__(
            model,
            drafters=drafters,
            planner=planner,
            verification=verification,
            tokenizer=tokenizer,
            config=config,
        )
        self._flight: Flight | None = None  # launched before it was asked for
        self._is_amid_step = False

    def run(self) -> dict[str, Request]:
        """Step until nothing is left to do; the finished requests by id.

        Events are kept for `take_events`: whoever runs for hours takes them, and may drop them.
        """
        finished: dict[str, Request] = {}
        while self._intake.live:
            self.step()
            finished.update({request.id: request for request in self._ended})
        return finished

    def close(self) -> None:
        """Free the cache; the model is as it was found. Requests still live are dropped."""
        self._is_closed = True
        self._flight = None
        if self._is_amid_step:
            self._intake.start_again()  # whoever keeps a request finds what was told
        self._intake.live.clear()
        self._host.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def step(self) -> Observation:
        """Decode one step; an empty observation where there is nothing to do.

        Where steps overlap, the next one is launched before this one is returned: a request that is
        submitted or cancelled meanwhile takes part, or no more, from the one after it on.

        Whatever a step raises, an interrupt or what a user's own processor raised, the next one may be
        asked for: requests go on from the tokens that they were given, and are computed anew.
        """
        self._check_open()
        self._ended = []
        try:
            # Whoever steps in inference mode and goes on outside finds tensors that may be written.
            with device_scope(self.runner.device), torch.inference_mode(False), torch.no_grad():
                return self._step()
        except Exception as error:
            if self._is_closed:  # by another thread
                raise EngineClosed("the engine was closed while it decoded") from error
            raise

    def _step(self) -> Observation:
        if self._is_amid_step:  # the last one never came to its end
            self._flight = None
            self._start_again()
        self._is_amid_step = True
        observation = self._step_ahead() if self._overlaps else self._step_plainly()
        self._is_amid_step = False
        return observation

    def _step_plainly(self) -> Observation:
        """Launch a step, land it and learn from it."""
        flight = self._launch(self._tally.steps)
        observation = self._land(flight, self._ask(flight))
        self._learn(observation)
        return observation

    def _step_ahead(self) -> Observation:
        """Land a step, and launch the next before learning from it, if the planner allows that."""
        flight, self._flight = self._flight or self._launch(self._tally.steps), None
        observation, ahead = self._land_behind(flight)
        has_next = bool(self._intake.live)
        learns_late = has_next and self.planner.allows_late_observations
        if not learns_late:
            self._learn(observation)
        try:
            if has_next:
                ahead = ahead or self._launch(observation.view.step + 1)
                self._flight = ahead if ahead.batch.pieces else None
        finally:
            if learns_late:
                self._learn(observation)
                self.planner.take_observe_seconds()  # the flight's own clock counts them
        if learns_late and self._flight is not None:
            self._flight.clock.lap("learning")
        return observation

    def _land_behind(self, flight: Flight) -> tuple[Observation, Flight | None]:
        """Land a step behind the next one, where that can be launched before; else alone."""
        asked = self._ask(flight)
        ahead = self._launch_ahead(flight, asked)
        try:
            if ahead is not None:
                flight.clock.follow()
            observation = self._land(flight, asked)
        except BaseException:
            if ahead is not None:
                self.scheduler.step_back(ahead.batch.unknown)
            raise
        if ahead is None:
            return observation, None
        ahead.clock.catch_up()
        return observation, ahead.without(self._ended)

    def _launch(self, step: int) -> Flight:
        """Schedule, plan and draft a step, and ask the device for its forward."""
        clock = self._clock()
        observe_seconds = self.planner.take_observe_seconds()
        self._take_inbox()
        batch = Batch(self._next_batch(), self._intake.live)
        view, plan = self._plan(batch, step, clock)
        flight = self._take_off(batch, view, plan, clock)
        shadows = self._shadows(batch, plan)
        clock.lap("meanwhile")
        return replace(flight, observe_seconds=observe_seconds, shadows=shadows)

    def _launch_ahead(self, flight: Flight, asked: Asked) -> Flight | None:
        """The step after `flight`, if its tokens are on the device and nobody would draft after them."""
        if asked.tokens is None or not self._goes_on(flight):
            return None
        clock = self._clock(before=flight.clock)
        scheduled = self.scheduler.next_ahead(flight.ending)
        if scheduled is None:
            return None
        self._free_kv_tokens = self.scheduler.free_draft_tokens(scheduled)
        batch = Batch(scheduled, self._intake.live, is_ahead=True)
        ahead: Flight | None = None
        try:
            view, plan = self._plan(batch, flight.view.step + 1, clock)
            if plan.is_off:
                ids = flight.next_ids(asked.tokens, batch.requests)
                ahead = self._take_off(batch, view, plan, clock, ids)
                self._tally.count_ahead()
        finally:
            if ahead is None:
                self.scheduler.step_back(batch.unknown)
        return ahead

    def _goes_on(self, flight: Flight) -> bool:
        """Whether the next step is all but sure to be like `flight`: nobody comes, prefills or drafts."""
        if not (flight.plan.is_off and self.planner.plans_ahead) or self._intake.has_news:
            return False
        return len(flight.batch.pieces) == len(flight.batch.decoding)
