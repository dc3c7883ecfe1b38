"""`sdcontrol advise`: which drafter and how many tokens, without a GPU at hand.

Knows the options and what they mean together; the figures come from `estimators`, their presentation
stands in `advice_report`. Needs no torch.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace

from sdcontrol.cli.advice_doubts import (
    arithmetic_doubts,
    fit_doubts,
    pair_doubts,
    profile_doubts,
    profile_fit_doubts,
    split_doubts,
)
from sdcontrol.cli.advice_inputs import (
    ASSUMED_RATES,
    acceptance_rates,
    find_machine,
    find_shape,
    plain_steps,
)
from sdcontrol.cli.advice_report import Report, report_lines, report_record
from sdcontrol.cli.command import Commands, Parser, add_command
from sdcontrol.cli.files import check_writable, write_json
from sdcontrol.errors import ConfigError
from sdcontrol.estimators.advice import DrafterSpec, Situation, advise
from sdcontrol.estimators.calibration import PlainStep, fit
from sdcontrol.estimators.config_numbers import MOST
from sdcontrol.estimators.hardware import HARDWARE
from sdcontrol.estimators.machine_profile import (
    LEAST_STEPS,
    MachineProfile,
    StepTime,
    relative_errors,
)
from sdcontrol.estimators.price import sparse_budget
from sdcontrol.estimators.roofline import Forward
from sdcontrol.estimators.shapes import ModelShape
from sdcontrol.estimators.storage import DTYPE_BYTES

__all__ = ["add_advise"]

_DESCRIPTION = "Predict what speculation brings for a model on a machine; needs neither."
_MOST_DRAFT_TOKENS = 1000
_MODEL = "a common model's name, a config.json or its folder, or bundled"
_EPILOG = (
    "The file of --fit is a CSV with a row per measured step without drafts. Its columns: batch_size; "
    "context_tokens (of each request); and one of plain_ms_per_token, plain_ms, ms (milliseconds), "
    "plain_seconds, seconds: the time of the step, in which each request gets one token. Other "
    "columns are left alone, and repeated rows count once."
)


def add_advise(commands: Commands) -> None:
    """Make the command known."""
    parser = add_command(commands, "advise", run, _DESCRIPTION)
    parser.epilog = _EPILOG
    _add_machine(parser)
    _add_situation(parser)
    _add_drafters(parser)


def _add_machine(parser: Parser) -> None:
    add = parser.add_argument_group("model and machine").add_argument
    add("--model", metavar="NAME|PATH", help=f"{_MODEL}; default: the one in the profile")
    add("--hardware", required=True, metavar="NAME|PATH", help="a GPU's name, or a profile")
    add("--tensor-parallel", type=int, default=1, metavar="N", help="devices (default 1)")
    add("--fit", metavar="PATH", help="CSV of measured plain steps to calibrate on, see below")


def _add_situation(parser: Parser) -> None:
    add = parser.add_argument_group("situation").add_argument
    add("--batch", type=int, default=1, metavar="N", help="requests decoded together (default 1)")
    add("--context", type=int, default=2048, metavar="TOKENS", help="of each (default 2048)")
    add(
        "--kv-dtype",
        default="auto",
        choices=("auto", *(name for name in DTYPE_BYTES if name != "float64")),
        help="of the KV cache (default auto: as the model says)",
    )


def _add_drafters(parser: Parser) -> None:
    add = parser.add_argument_group("drafters").add_argument
    shown = ",".join(f"{arm}={rate}" for arm, rate in ASSUMED_RATES.items())
    add(
        "--acceptance",
        metavar="DRAFTER=RATE,...",
        help="drafters to judge (ngram, sparse_kv:TOKENS, draft_model), each with the share of its "
        f"draft tokens that is accepted where the ones before were; default: {shown}",
    )
    add("--max-draft-tokens", type=int, default=8, metavar="N", help="longest draft (default 8)")
    add("--draft-model", metavar="NAME|PATH", help=_MODEL)
    add(
        "--draft-tensor-parallel",
        type=int,
        metavar="N",
        help="devices of the draft model; default: those of the target, but no more than the draft "
        "model has KV heads",
    )
    add(
        "--draft-kv-budget",
        type=int,
        metavar="TOKENS",
        help="context the draft model reads at most",
    )


def run(options: argparse.Namespace) -> int:
    """Advise, on standard output and where asked as JSON."""
    _check(options)
    read = [options.hardware, options.model, options.draft_model, options.fit]
    check_writable(options.json, inputs=read)
    report = _report(options)
    print(*report_lines(report), sep="\n")
    if options.json is not None:
        write_json(options.json, report_record(report))
    return 0


def _check(options: argparse.Namespace) -> None:
    for name in ("batch", "context", "tensor_parallel"):
        _check_count(name, getattr(options, name))
    _check_count("max_draft_tokens", options.max_draft_tokens, _MOST_DRAFT_TOKENS)
    for name in ("draft_tensor_parallel", "draft_kv_budget"):
        if (value := getattr(options, name)) is not None:
            _check_count(name, value)
            if options.draft_model is None:
                raise ConfigError(f"{_option(name)} is {value}, but there is no --draft-model")
    if (options.draft_tensor_parallel or 0) > options.tensor_parallel:
        raise ConfigError(
            f"--draft-tensor-parallel is {options.draft_tensor_parallel}, of "
            f"{options.tensor_parallel} devices; give --tensor-parallel too"
        )


def _check_count(name: str, value: int, most: int = MOST) -> None:
    if value < 1:
        raise ConfigError(f"{_option(name)} is {value}; give at least 1")
    if value > most:
        raise ConfigError(f"{_option(name)} is more than {most}; give at most that")


def _check_devices(name: str, devices: int, shape: ModelShape) -> None:
    if devices > shape.num_heads:
        raise ConfigError(
            f"{_option(name)} is {devices}, but {shape.name} has {shape.num_heads} attention heads; "
            "give no more devices than that"
        )


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


# ---- from options to a report


def _report(options: argparse.Namespace) -> Report:
    machine, profile = find_machine(options.hardware)
    steps = plain_steps(options.fit)
    shape = _target_shape(options.model, profile)
    _check_devices("tensor_parallel", options.tensor_parallel, shape)
    used = None if steps else profile
    target = _profiled(Forward(shape, machine, options.tensor_parallel), profile)
    alone = replace(target, tensor_parallel=1)  # as whatever a profile measured
    errors = relative_errors(alone, _steps(shape, used))
    target = _with_kv(target, options.kv_dtype)
    doubts = list(profile_fit_doubts(errors))
    if steps:
        target, errors, doubts = _fitted(target, steps)
    draft = _draft(options, target, used)
    doubts += _profile_doubts(options, shape, used)
    doubts += _model_doubts(options, target, draft)
    rates, assumed = acceptance_rates(options.acceptance, has_draft_model=draft is not None)
    drafters = [_spec(arm, rate, draft, options) for arm, rate in rates.items()]
    offered = [spec for spec in drafters if _is_offered(spec, options.context)]
    situation = Situation(options.batch, options.context)
    return Report(
        target=target,
        draft=draft,
        situation=situation,
        drafters=tuple(offered),
        assumed=tuple(assumed),
        not_offered=tuple(spec.arm for spec in drafters if spec not in offered),
        advice=advise(target, situation, offered, range(1, options.max_draft_tokens + 1)),
        max_draft_tokens=options.max_draft_tokens,
        calibrated_on=str(options.fit if steps else options.hardware) if errors else None,
        fit_errors=tuple(errors),
        doubts=tuple(doubts),
    )


def _fitted(target: Forward, steps: Sequence[PlainStep]) -> tuple[Forward, list[float], list[str]]:
    """Calibrated on these; its relative errors, and what speaks against it."""
    fitted = replace(target, calibration=fit(target, steps))
    measured = [_step_time(step) for step in steps]
    errors = relative_errors(fitted, measured)
    return fitted, errors, list(fit_doubts(fitted, measured, errors))


def _target_shape(given: str | None, profile: MachineProfile | None) -> ModelShape:
    if given is not None:
        return find_shape(given, "target")
    measured = None if profile is None else profile.times("target")
    if measured is None:
        raise ConfigError("--model is missing, and no profile given as --hardware measured one")
    return measured.shape


def _profiled(forward: Forward, profile: MachineProfile | None) -> Forward:
    """On the profile's steps, or on its ceilings; without one as is usual."""
    if profile is None:
        return forward
    return replace(forward, calibration=profile.calibration(forward.shape))


def _with_kv(forward: Forward, dtype: str) -> Forward:
    """With keys and values in this dtype: how far a machine runs from its ceilings stays."""
    if dtype == "auto":
        return forward
    return replace(forward, shape=replace(forward.shape, kv_bytes=DTYPE_BYTES[dtype]))


def _draft(
    options: argparse.Namespace, target: Forward, profile: MachineProfile | None
) -> Forward | None:
    """The draft model runs as the target was seen to, unless the profile measured it itself."""
    if options.draft_model is None:
        return None
    shape = find_shape(options.draft_model, "draft")
    devices = options.draft_tensor_parallel or min(target.tensor_parallel, shape.num_kv_heads)
    _check_devices("draft_tensor_parallel", devices, shape)
    forward = Forward(shape, target.hardware, devices, target.calibration)
    return _with_kv(_profiled(forward, profile), options.kv_dtype)


def _spec(arm: str, rate: float, draft: Forward | None, options: argparse.Namespace) -> DrafterSpec:
    if arm == "draft_model":
        return DrafterSpec(arm, rate, draft, options.draft_kv_budget)
    return DrafterSpec(arm, rate)


def _steps(shape: ModelShape, profile: MachineProfile | None) -> Sequence[StepTime]:
    """Those of a profile that the model of this shape was calibrated on."""
    steps = () if profile is None else profile.steps(shape)
    return steps if len(steps) >= LEAST_STEPS else ()


def _step_time(step: PlainStep) -> StepTime:
    return StepTime(
        batch_size=step.batch_size,
        tokens_per_request=1,
        context_tokens=step.context_tokens,
        seconds=step.seconds,
    )


def _profile_doubts(
    options: argparse.Namespace, shape: ModelShape, profile: MachineProfile | None
) -> list[str]:
    if profile is None:
        return []
    shapes = [shape]
    if options.draft_model is not None:
        shapes.append(find_shape(options.draft_model, "draft"))
    return [doubt for own in shapes for doubt in profile_doubts(profile, own)]


def _model_doubts(
    options: argparse.Namespace, target: Forward, draft: Forward | None
) -> Iterator[str]:
    if draft is not None:
        yield from pair_doubts(target.shape, draft.shape)
    for forward in (target,) if draft is None else (target, draft):
        yield from split_doubts(forward)
        if forward.hardware in HARDWARE.values():
            yield from arithmetic_doubts(forward, options.batch * (1 + options.max_draft_tokens))


def _is_offered(drafter: DrafterSpec, context_tokens: int) -> bool:
    """A sparse drafter that would read the whole context is the target itself."""
    budget = sparse_budget(drafter.arm)
    return budget is None or context_tokens > budget
