"""Drafting and verification of one simulated step: what is drafted, refined, accepted, and read.

Follows `sdcontrol/engine/drafting.py` on recorded outcomes. Knows nothing of schedulers or seconds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from sdcontrol.core import BatchView, Confidence, Plan, Planner, family_of
from sdcontrol.traces.simulated_cache import DraftCaches
from sdcontrol.traces.simulated_drafts import FREE_FAMILIES, LiveRequest, RecordedArm
from sdcontrol.traces.step_times import DraftWork, StepWork

__all__ = ["SimulatedDrafting", "SimulatedDrafts"]


@dataclass(frozen=True, slots=True)
class SimulatedDrafts:
    """What came of drafting and verification. Tuples follow the view."""

    reserved: tuple[int, ...]  # slots, as planned
    drafted: tuple[int, ...]
    proposed: tuple[int, ...]
    accepted: tuple[int, ...]
    arms: tuple[RecordedArm | None, ...] = ()  # empty: nobody drafts
    accepted_nodes: tuple[tuple[int, ...], ...] | None = None
    confidence: Confidence | None = None


class SimulatedDrafting:
    """The drafters of a simulation."""

    def __init__(self, planner: Planner, caches: DraftCaches, drafters: Sequence[str]) -> None:
        self._planner = planner
        self._caches = caches
        self._free = tuple(arm for arm in drafters if family_of(arm) in FREE_FAMILIES)
        policy = getattr(planner, "policy", planner)
        has_refine = getattr(policy, "refine", None) is not None
        self._refines = has_refine and getattr(planner, "refines", True)
        by_confidence = getattr(policy, "refines_by_confidence", False)
        self._refines_hinted = getattr(planner, "refines_hinted", not by_confidence)
        self._asks_between = getattr(
            planner, "refines_between_rounds", getattr(policy, "refines_between_rounds", True)
        )

    def propose(self, view: BatchView, plan: Plan, live: Sequence[LiveRequest]) -> SimulatedDrafts:
        """What comes of `plan`; raises `CounterfactualError` where nothing is recorded."""
        planned = tuple([choice.num_draft_tokens for choice in plan.choices])
        if not any(planned):
            return SimulatedDrafts(planned, planned, planned, planned)
        arms: list[RecordedArm | None] = []
        drafted, accepted, is_counted = [], [], True
        for request, choice, length in zip(live, plan.choices, planned, strict=True):
            arm, got = None, 0
            if choice.drafter is not None:
                arm = request.arms.get(choice.drafter)
                if arm is None or length > arm.depth:
                    request.refuse(choice.drafter, length)
                position, limits = request.generated, arm.limits
                if limits is not None and limits[position] < length:
                    length = limits[position]
                got = min(arm.accepted[position], length)
                is_counted = is_counted and arm.is_counted
                if arm.is_model:
                    self._caches.use(request, arm.name)
            arms.append(arm)
            drafted.append(length)
            accepted.append(got)
        if not is_counted or (self._refines and self._refines_hinted):
            return self._propose_in_detail(view, plan, live, arms)
        as_drafted = tuple(drafted)
        return SimulatedDrafts(planned, as_drafted, as_drafted, tuple(accepted), tuple(arms))

    def shadow(
        self, live: Sequence[LiveRequest], plan: Plan, accepted: Sequence[int]
    ) -> dict[str, tuple[int | None, ...]]:
        """By free arm, how far its chain would have agreed with this step's tokens."""
        return {
            name: tuple(
                [
                    _agreement(request, name, more + 1) if choice.drafter != name else None
                    for request, choice, more in zip(live, plan.choices, accepted, strict=True)
                ]
            )
            for name in self._free
        }

    def work(
        self,
        view: BatchView,
        drafts: SimulatedDrafts,
        emitted: Sequence[int],
        shadow: Mapping[str, object],
    ) -> StepWork:
        """What the step computes and reads."""
        context = [request.context_tokens for request in view.requests]
        works: dict[str, DraftWork] = {}
        verified = 0
        if drafts.arms:
            works = _draft_works(view, context, drafts)
            verified = sum([n * kv for n, kv in zip(drafts.proposed, context, strict=True)])
        return StepWork(
            num_requests=len(context),
            draft_tokens=sum(drafts.proposed),
            kv_tokens=sum(context),
            prefill_tokens=view.prefill_tokens,
            emitted_tokens=sum(emitted),
            drafts=works,
            verified_kv_tokens=verified,
            longest_draft=max(drafts.proposed, default=0),
            offered_arms=sum([len(request.drafters) for request in view.requests]),
            shadow_drafts=len(shadow) * len(context),
        )

    def _propose_in_detail(
        self,
        view: BatchView,
        plan: Plan,
        live: Sequence[LiveRequest],
        arms: Sequence[RecordedArm | None],
    ) -> SimulatedDrafts:
        """With trees, and with confidence that the planner may refine by."""
        session = _Session(view, plan, live, arms)
        if self._refines and (self._refines_hinted or session.is_confident()):
            asks = {"asks_between": self._asks_between, "asks_always": self._refines_hinted}
            session.draft_in_rounds(self._planner, **asks)
        proposed = tuple(map(min, session.drafted, session.limits))
        return SimulatedDrafts(
            reserved=tuple([choice.num_draft_tokens for choice in plan.choices]),
            drafted=tuple(session.drafted),
            proposed=proposed,
            accepted=tuple(
                [
                    arm.accepted_of(request.generated, n) if arm is not None and n else 0
                    for request, arm, n in zip(live, arms, proposed, strict=True)
                ]
            ),
            arms=tuple(arms),
            accepted_nodes=_accepted_nodes(live, arms, proposed),
            confidence=session.confidence(),
        )


class _Session:
    """The drafts of one step while they are made."""

    def __init__(
        self,
        view: BatchView,
        plan: Plan,
        live: Sequence[LiveRequest],
        arms: Sequence[RecordedArm | None],
    ) -> None:
        self._view, self._plan = view, plan
        self._live, self._arms = live, arms
        self.limits = [choice.num_draft_tokens for choice in plan.choices]
        self.drafted = [
            min(n, arm.limit(request.generated)) if arm is not None else 0
            for n, arm, request in zip(self.limits, arms, live, strict=True)
        ]

    def is_confident(self) -> bool:
        """Whether a drafter that works in rounds says how sure it is."""
        return any(
            arm is not None and arm.confidence is not None and not arm.is_free for arm in self._arms
        )

    def draft_in_rounds(self, planner: Planner, *, asks_between: bool, asks_always: bool) -> None:
        """Draft again, family by family and round by round, asking `planner` in the end or after each.

        Where no drafter says how sure it is, in the end only if it `asks_always`.
        """
        wanted, self.drafted = self.drafted, [0] * len(self.drafted)
        families: dict[str, list[int]] = {}
        for row, arm in enumerate(self._arms):
            if arm is not None:
                families.setdefault(arm.family, []).append(row)
        for family, rows in families.items():
            if family in FREE_FAMILIES or not asks_between:
                for row in rows:
                    self.drafted[row] = wanted[row]
            else:
                self._draft_family(planner, rows, wanted)
        if self.confidence() is not None or (asks_always and any(self.drafted)):
            self._shorten(planner)

    def _draft_family(self, planner: Planner, rows: list[int], wanted: list[int]) -> None:
        while is_open := [row for row in rows if self.drafted[row] < wanted[row]]:
            for row in is_open:
                self.drafted[row] += 1
            if any(self.drafted[row] < wanted[row] for row in is_open):
                self._shorten(planner)
                for row in rows:
                    wanted[row] = min(wanted[row], self.limits[row])

    def _shorten(self, planner: Planner) -> None:
        confidence = self.confidence() or ((),) * len(self.drafted)
        refined = planner.refine(self._view, self._plan, confidence)
        kept = [choice.num_draft_tokens for choice in refined.choices]
        self.limits = [min(limit, n) for limit, n in zip(self.limits, kept, strict=True)]

    def confidence(self) -> Confidence | None:
        if all(arm is None or arm.confidence is None for arm in self._arms):
            return None
        rows = tuple(
            [
                arm.confidence_of(request.generated, n) if arm is not None and n else ()
                for arm, request, n in zip(self._arms, self._live, self.drafted, strict=True)
            ]
        )
        return rows if any(rows) else None


def _accepted_nodes(
    live: Sequence[LiveRequest], arms: Sequence[RecordedArm | None], proposed: Sequence[int]
) -> tuple[tuple[int, ...], ...] | None:
    """The accepted paths, where any draft is a tree."""
    rows = list(zip(live, arms, proposed, strict=True))
    if all(arm is None or arm.is_chain(request.generated, n) for request, arm, n in rows):
        return None
    return tuple(
        arm.nodes(request.generated, n) if arm is not None else () for request, arm, n in rows
    )


def _agreement(live: LiveRequest, name: str, num_tokens: int) -> int | None:
    """How many of the step's tokens a chain of `name` would have drafted; None: it has none."""
    arm, position = live.arms.get(name), live.generated
    if arm is None or num_tokens > arm.depth or num_tokens > arm.limit(position):
        return None
    if not arm.is_chain(position, num_tokens):
        return None
    return arm.accepted_of(position, num_tokens)


def _draft_works(
    view: BatchView, context: Sequence[int], drafts: SimulatedDrafts
) -> dict[str, DraftWork]:
    """By family: who still drafts in each round, what they read, what must be caught up."""
    rounds: dict[str, tuple[list[int], list[int]]] = {}
    catch_up: dict[str, int] = {}
    rows = zip(view.requests, drafts.arms, drafts.drafted, context, strict=True)
    for request, arm, depth, kv_tokens in rows:
        if arm is None or not depth:
            continue
        family = arm.family
        if family not in rounds:
            rounds[family] = [0] * arm.depth, [0] * arm.depth
        counts, reads = rounds[family]
        counts[depth - 1] += 1
        reads[depth - 1] += min(kv_tokens, arm.budget)
        if arm.is_model:
            lag = request.hints[arm.name].catch_up_tokens
            catch_up[family] = catch_up.get(family, 0) + lag
    return {
        family: DraftWork(_from_the_end(counts), _from_the_end(reads), catch_up.get(family, 0))
        for family, (counts, reads) in rounds.items()
    }


def _from_the_end(by_last_round: list[int]) -> tuple[int, ...]:
    """Sums over this and all later rounds; rounds in which nobody drafts are left out."""
    sums = list(accumulate(reversed(by_last_round)))
    return tuple([total for total in reversed(sums) if total])
