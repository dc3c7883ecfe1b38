"""What was chosen for each request, and why: a short history, kept for the latest requests.

Knows observations only. A change of choice is an event; steps between two changes are counted.
"""

from collections import OrderedDict
from dataclasses import dataclass, field, replace

from sdcontrol.core import Choice, Observation, RequestView

__all__ = ["ChoiceChange", "RequestHistory", "RequestLog"]

_MOST_REQUESTS = 1024  # the latest ones
_MOST_CHANGES = 32  # of one request, the latest ones


@dataclass(frozen=True, slots=True)
class ChoiceChange:
    """From this step on, another choice than before."""

    step: int
    generated_tokens: int
    choice: Choice
    reason: str  # of the plan that made it
    known: str = ""  # of this request, by which it may have got another choice than others


@dataclass(slots=True)
class RequestHistory:
    """One request so far."""

    id: str
    steps: int = 0
    emitted: int = 0
    proposed: dict[str, int] = field(default_factory=dict)  # by arm
    accepted: dict[str, int] = field(default_factory=dict)  # by arm
    chosen: dict[Choice, int] = field(default_factory=dict)  # steps, up to the latest change
    changes: list[ChoiceChange] = field(default_factory=list)
    _same: int = 0  # steps since the latest change

    @property
    def choices(self) -> dict[Choice, int]:
        """Steps by choice, most frequent first."""
        counts = dict(self.chosen)
        if self.changes:
            latest = self.changes[-1].choice
            counts[latest] = counts.get(latest, 0) + self._same
        return dict(sorted(counts.items(), key=lambda item: -item[1]))

    def lines(self) -> list[str]:
        """In words: a line of totals, then one per change of choice."""
        shares = ", ".join(f"{_name(c)} {n / self.steps:.0%}" for c, n in self.choices.items())
        lines = [f"{self.id}: {self.emitted} tokens in {self.steps} steps; {shares or 'no steps'}"]
        for arm, proposed in self.proposed.items():
            lines.append(f"  {arm}: {self.accepted[arm]} of {proposed} draft tokens accepted")
        for change in self.changes:
            why = "; ".join(filter(None, (change.reason, change.known)))
            choice = f"{_name(change.choice)}: {why}" if why else _name(change.choice)
            lines.append(f"  from token {change.generated_tokens} on {choice}")
        return lines

    def __deepcopy__(self, memo: object) -> "RequestHistory":
        """Choices and their changes are frozen, and shared: there are thousands in a report."""
        return replace(
            self,
            proposed=dict(self.proposed),
            accepted=dict(self.accepted),
            chosen=dict(self.chosen),
            changes=list(self.changes),
        )

    def _add(self, row: int, observation: Observation) -> None:
        choice = observation.plan.choices[row]
        self.steps += 1
        self.emitted += observation.emitted[row]
        if not self.changes or self.changes[-1].choice != choice:
            self._change(row, choice, observation)
        self._same += 1
        if choice.drafter is not None:
            arm = choice.drafter
            self.proposed[arm] = self.proposed.get(arm, 0) + observation.proposed[row]
            self.accepted[arm] = self.accepted.get(arm, 0) + observation.accepted[row]

    def _change(self, row: int, choice: Choice, observation: Observation) -> None:
        if self.changes:
            latest = self.changes[-1].choice
            self.chosen[latest] = self.chosen.get(latest, 0) + self._same
        self._same = 0
        view = observation.view.requests[row]
        step, reason = observation.view.step, observation.plan.reason
        is_offered = any(request.drafters for request in observation.view.requests)
        known = self._known(view, choice) if is_offered else ""
        self.changes.append(ChoiceChange(step, view.generated_tokens, choice, reason, known))
        del self.changes[:-_MOST_CHANGES]

    def _known(self, view: RequestView, choice: Choice) -> str:
        """What hints and earlier drafts of this request said when the choice was made."""
        if not view.drafters:
            return "it may use no drafter now"
        facts: list[str] = []
        for arm in view.drafters if choice.drafter is None else (choice.drafter,):
            own: list[str] = []
            hint = view.hints.get(arm)
            if hint is not None and hint.max_draft_tokens == 0:
                own.append("has nothing to draft")
            elif hint is not None and hint.match_tokens is not None:
                own.append(f"match of {hint.match_tokens} tokens")
            if self.proposed.get(arm):
                own.append(f"{self.accepted[arm]} of {self.proposed[arm]} accepted so far")
            if own:
                facts.append(f"{arm} {', '.join(own)}")
        return "; ".join(facts)


class RequestLog:
    """The histories of the latest requests, by id, in order of appearance."""

    def __init__(self) -> None:
        self.requests: OrderedDict[str, RequestHistory] = OrderedDict()

    def add(self, observation: Observation) -> None:
        """Note one step of every request in it."""
        requests = self.requests
        for row, view in enumerate(observation.view.requests):
            history = requests.get(view.id)
            if history is None:
                history = requests[view.id] = RequestHistory(view.id)
                if len(requests) > _MOST_REQUESTS:
                    self._forget_one(observation)
            history._add(row, observation)

    def _forget_one(self, observation: Observation) -> None:
        """The oldest, unless it decodes on: its totals would begin anew."""
        live = {view.id for view in observation.view.requests}
        oldest = next((name for name in self.requests if name not in live), None)
        del self.requests[oldest or next(iter(self.requests))]


def _name(choice: Choice) -> str:
    return f"{choice.drafter}:{choice.num_draft_tokens}" if choice.drafter else "off"
