"""What a policy answers, and whether it can be carried out.

Knows plans and views; nothing of policies, faults or what is believed.
"""

from sdcontrol.core import BatchView, Choice, Confidence, Plan
from sdcontrol.errors import PlanError
from sdcontrol.refusals import check_answer

__all__ = ["check_confidence", "check_plan", "check_shorter", "plain"]


def plain(view: BatchView, fault: str) -> Plan:
    """No drafts, because of a fault."""
    return Plan.off(view, f"policy fault: {fault.partition(':')[0]}")


def check_plan(plan: Plan, view: BatchView) -> None:
    """Raise `PlanError` where this is no plan for `view`."""
    if not isinstance(plan, Plan):
        raise PlanError(f"policy returned {type(plan).__name__}; return a Plan")
    plan.check(view)


def check_confidence(confidence: Confidence, plan: Plan, view: BatchView) -> None:
    """Raise `PlanError` where these are not the confidences in drafts of `plan`, for `view`."""
    rows, choices, num_requests = len(confidence), len(plan.choices), len(view.requests)
    if not rows == choices == num_requests:
        raise PlanError(
            f"confidence of {rows} requests and a plan of {choices} choices for {num_requests} requests; "
            "give one entry per request of the view, in its order, () where nothing was drafted"
        )


def check_shorter(shorter: Plan, plan: Plan) -> None:
    """Raise `PlanError` where this is not `plan` with fewer draft tokens."""
    if not isinstance(shorter, Plan):
        raise PlanError(f"refine returned {type(shorter).__name__}; return a shortened Plan")
    check_answer(shorter, Choice, len(plan.choices))
    for row, (after, before) in enumerate(zip(shorter.choices, plan.choices, strict=True)):
        if after is before:
            continue
        is_suffix_dropped = after.num_draft_tokens <= before.num_draft_tokens
        if not is_suffix_dropped or after.drafter not in (before.drafter, None):
            raise PlanError(
                f"refine changed {before} to {after} for request {row}; it may only lower "
                "num_draft_tokens"
            )
