"""What `sdcontrol advise` found, as lines for people and as a record for machines.

Knows forwards and advice; nothing of options and files. With tensor parallelism, FLOPs and bytes are
those of one device.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from sdcontrol import __version__
from sdcontrol.cli.advice_doubts import median_error
from sdcontrol.estimators.advice import Advice, DrafterSpec, Option, Situation
from sdcontrol.estimators.price import sparse_budget
from sdcontrol.estimators.roofline import Forward, Part, Profile

__all__ = ["Report", "report_lines", "report_record"]


@dataclass(frozen=True, slots=True)
class Report:
    """A question and its answer."""

    target: Forward
    draft: Forward | None
    situation: Situation
    drafters: tuple[DrafterSpec, ...]
    assumed: tuple[str, ...]  # drafters whose acceptance rate nobody gave
    not_offered: tuple[str, ...]  # drafters that there is no use for here
    advice: Advice
    max_draft_tokens: int
    calibrated_on: str | None  # a file
    fit_errors: tuple[float, ...]  # relative, of the steps in it
    doubts: tuple[str, ...] = ()  # of calibration and models, a line each

    @property
    def plain(self) -> Profile:
        """The plain step."""
        return self.verification(0)

    def verification(self, num_draft_tokens: int) -> Profile:
        """The target's forward that verifies so many draft tokens per request."""
        batch = self.situation.batch_size
        kv_tokens = batch * self.situation.context_tokens
        return self.target.profile(batch * (1 + num_draft_tokens), kv_tokens, batch)

    def drafting_round(self, drafter: DrafterSpec) -> Profile | None:
        """The forward that drafts one token per request; None for a drafter without one."""
        if drafter.arm == "ngram":
            return None
        batch, context = self.situation.batch_size, self.situation.context_tokens
        budget = drafter.kv_budget_tokens or sparse_budget(drafter.arm) or context
        forward = drafter.forward or self.target
        return forward.profile(batch, batch * min(budget, context), batch)

    @property
    def needed_bytes(self) -> float:
        """Weights and KV cache on one device."""
        tokens = self.situation.batch_size * self.situation.context_tokens
        return sum(_stored_bytes(f, tokens) for f in (self.target, self.draft) if f is not None)

    @property
    def fits_in_memory(self) -> bool:
        """Whether one device can hold that."""
        return self.needed_bytes <= self.target.hardware.memory_bytes


def _stored_bytes(forward: Forward, kv_tokens: int) -> float:
    shape, devices = forward.shape, forward.tensor_parallel
    tables = shape.head_parameters * (1 if shape.is_head_tied else 2)
    layers = shape.num_parameters - tables
    weights = layers * shape.weight_bytes + tables * shape.head_bytes + shape.extra_attention_bytes
    kv_bytes = kv_tokens * shape.kv_bytes_per_token / min(devices, shape.num_kv_heads)
    return weights / devices + kv_bytes


def _bound(profile: Profile) -> str:
    """Whether memory or arithmetic takes longer, overheads and all-reduces aside."""
    memory = [p for p in profile.parts if _part_bound(p, profile) == "memory"]
    by_memory = sum(part.seconds for part in memory)
    return "memory" if 2.0 * by_memory >= sum(p.seconds for p in profile.parts) else "compute"


def _part_bound(part: Part, profile: Profile) -> str:
    is_memory = part.intensity_flops_per_byte < profile.ridge_flops_per_byte
    return "memory" if is_memory else "compute"


# ---- for machines


def report_record(report: Report) -> dict[str, object]:
    """Plain numbers, strings, lists and mappings."""
    advice = report.advice
    rates = {spec.arm: spec.acceptance for spec in report.drafters}
    options = [_option_record(option, rates[option.arm]) for option in advice.options]
    return {
        "version": __version__,
        **_question_record(report),
        "ridge_flops_per_byte": report.plain.ridge_flops_per_byte,
        "bound": _bound(report.plain),
        "plain_seconds": advice.plain_seconds,
        "plain": _profile_record(report.plain),
        "verification": [
            {"num_draft_tokens": length, **_profile_record(report.verification(length))}
            for length in range(1, report.max_draft_tokens + 1)
        ],
        "drafting": [_drafter_record(report, spec) for spec in report.drafters],
        "not_offered": list(report.not_offered),
        "options": options,
        "best": options[0] if advice.best is not None else None,
    }


def _question_record(report: Report) -> dict[str, object]:
    target, draft = report.target, report.draft
    return {
        "model": asdict(target.shape) | {"num_parameters": target.shape.num_parameters},
        "hardware": asdict(target.hardware),
        "tensor_parallel": target.tensor_parallel,
        "draft_model": None if draft is None else asdict(draft.shape),
        "draft_tensor_parallel": None if draft is None else draft.tensor_parallel,
        "batch_size": report.situation.batch_size,
        "context_tokens": report.situation.context_tokens,
        "calibration": asdict(target.calibration),
        "calibrated_on": report.calibrated_on,
        "fit_median_error": median_error(report.fit_errors) if report.fit_errors else None,
        "doubts": list(report.doubts),
        "needed_bytes": report.needed_bytes,
        "fits_in_memory": report.fits_in_memory,
    }


def _profile_record(profile: Profile) -> dict[str, object]:
    parts = [
        {
            "name": part.name,
            "flops": part.flops,
            "bytes": part.bytes,
            "intensity_flops_per_byte": part.intensity_flops_per_byte,
            "bound": _part_bound(part, profile),
            "seconds": part.seconds,
        }
        for part in profile.parts
    ]
    return {
        "flops": profile.flops,
        "bytes": profile.bytes,
        "intensity_flops_per_byte": profile.intensity_flops_per_byte,
        "ridge_flops_per_byte": profile.ridge_flops_per_byte,
        "bound": _bound(profile),
        "longest": profile.bound,
        "seconds": profile.seconds,
        "parts": parts,
        "all_reduce_seconds": profile.all_reduce_seconds,
        "overhead_seconds": profile.overhead_seconds,
    }


def _drafter_record(report: Report, drafter: DrafterSpec) -> dict[str, object]:
    profile = report.drafting_round(drafter)
    return {
        "drafter": drafter.arm,
        "acceptance_rate": drafter.acceptance,
        "is_rate_assumed": drafter.arm in report.assumed,
        "round_seconds": 0.0 if profile is None else profile.seconds,
        "round": None if profile is None else _profile_record(profile),
    }


def _option_record(option: Option, rate: float) -> dict[str, object]:
    return {
        "drafter": option.arm,
        "num_draft_tokens": option.num_draft_tokens,
        "acceptance_rate": rate,
        "tokens_per_step": option.tokens_per_step,
        "draft_round_seconds": option.draft_round_seconds,
        "draft_seconds": option.num_draft_tokens * option.draft_round_seconds,
        "verify_seconds": option.verify_seconds,
        "step_seconds": option.step_seconds,
        "speedup": option.speedup,
    }


# ---- for people


def report_lines(report: Report) -> list[str]:
    """What the step moves, what every drafter would bring, best first, and the advice."""
    return [*_head(report), "", *_forwards(report), "", *_options(report), *_advice(report)]


def _head(report: Report) -> Iterator[str]:
    target, situation = report.target, report.situation
    devices = f"{target.tensor_parallel} x " if target.tensor_parallel > 1 else ""
    yield (
        f"{target.shape.name} on {devices}{target.hardware.name}, batch {situation.batch_size}, "
        f"context {situation.context_tokens}: {_bound(report.plain)}-bound, "
        f"{report.plain.intensity_flops_per_byte:.3g} FLOP/byte where the ridge is at "
        f"{report.plain.ridge_flops_per_byte:.3g}"
    )
    if report.draft is not None:
        devices = f" on {report.draft.tensor_parallel} of them" if devices else ""
        yield f"draft model {report.draft.shape.name}{devices}"
    if report.calibrated_on is not None:
        error = f"median error {100 * median_error(report.fit_errors):.1f} %"
        yield f"calibrated on {report.calibrated_on}: {len(report.fit_errors)} measured steps, {error}"
    yield from (f"beware: {doubt}" for doubt in report.doubts)
    if not report.fits_in_memory:
        yield (
            f"beware: weights and KV cache take {_scaled(report.needed_bytes)}B per device, "
            f"of {_scaled(target.hardware.memory_bytes)}B"
        )


def _forwards(report: Report) -> Iterator[str]:
    per = " per device" if report.target.tensor_parallel > 1 else ""
    yield f"{'forward' + per:<28}{'FLOPs':>9}{'bytes':>9}{'FLOP/byte':>11}{'ms':>12}  bound"
    plain = report.plain
    yield _row("plain step", plain)
    for part in plain.parts:
        yield _row(f"  {part.name}", plain, part)
    if plain.all_reduce_seconds:
        yield f"{'  all-reduces':<28}{plain.all_reduce_seconds * 1e3:>41.3f}"
    yield f"{'  overhead':<28}{plain.overhead_seconds * 1e3:>41.3f}"
    for length in range(1, report.max_draft_tokens + 1):
        yield _row(f"verify {length} draft tokens", report.verification(length))
    for drafter in report.drafters:
        profile = report.drafting_round(drafter)
        if profile is not None:
            yield _row(f"round of {drafter.arm}", profile)


def _row(name: str, profile: Profile, part: Part | None = None) -> str:
    shown = profile if part is None else part
    bound = _bound(profile) if part is None else _part_bound(part, profile)
    return (
        f"{name:<28}{_scaled(shown.flops):>9}{_scaled(shown.bytes):>9}"
        f"{shown.intensity_flops_per_byte:>11.3g}{shown.seconds * 1e3:>12.3f}  {bound}"
    )


def _options(report: Report) -> Iterator[str]:
    yield (
        f"{'drafter':<20}{'tokens':>7}{'tokens/step':>13}{'drafting ms':>13}{'verify ms':>12}"
        f"{'step ms':>12}{'speedup':>9}"
    )
    for option in report.advice.options:
        drafting = option.num_draft_tokens * option.draft_round_seconds
        yield (
            f"{option.arm:<20}{option.num_draft_tokens:>7}{option.tokens_per_step:>13.2f}"
            f"{drafting * 1e3:>13.3f}{option.verify_seconds * 1e3:>12.3f}"
            f"{option.step_seconds * 1e3:>12.3f}{option.speedup:>8.2f}x"
        )


def _advice(report: Report) -> Iterator[str]:
    for arm in report.not_offered:
        yield f"{arm} is left out: it would read the whole context, as the target does"
    rates = {spec.arm: spec.acceptance for spec in report.drafters}
    if report.assumed:
        assumed = ", ".join(f"{arm}={rates[arm]:g}" for arm in report.assumed if arm in rates)
        yield f"acceptance rates assumed, not known: {assumed or 'none'}"
    best = report.advice.best
    yield ""
    if best is None:
        yield "advice: do not speculate here; nothing beats the plain step"
    else:
        plural = "s" if best.num_draft_tokens > 1 else ""
        yield (
            f"advice: {best.arm} with {best.num_draft_tokens} draft token{plural}, "
            f"{best.speedup:.2f}x the speed of decoding without drafts"
        )


def _scaled(count: float) -> str:
    """With three digits and a prefix: 16.1G."""
    for power, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if float(f"{count:.3g}") >= power:  # 999.9 is 1k
            return f"{count / power:.3g}{prefix}"
    return f"{count:.3g}"
