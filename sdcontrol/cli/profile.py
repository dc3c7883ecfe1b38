"""`sdcontrol profile`: measure this machine, and perhaps a model on it, and write that down.

Knows the options, the order of things and the terminal; measuring is `engine.profiling`'s, the file
`estimators.machine_profile`'s.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from sdcontrol import __version__
from sdcontrol.cli.command import Commands, add_command
from sdcontrol.cli.files import as_text, check_writable
from sdcontrol.errors import ConfigError
from sdcontrol.estimators.hardware import Hardware
from sdcontrol.estimators.machine_profile import (
    LEAST_STEPS,
    MachineProfile,
    ModelTimes,
    StepTime,
)
from sdcontrol.estimators.shapes import ModelShape, from_config

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from sdcontrol.engine.profiling import StepMeasurement, StepShape

__all__ = ["add_profile"]

_DESCRIPTION = "Measure this machine's ceilings, and a model's step cost, for advise and replay."
_DEFAULT_PATH = "profile.json"
_BATCH_SIZES = (1, 4, 16)
_TOKENS_PER_REQUEST = (1, 2, 4, 8)
_CONTEXT_TOKENS = (256, 1024, 3072)
_MOST_SECONDS = 30.0
Role = Literal["target", "draft"]


def add_profile(commands: Commands) -> None:
    """Make the command known."""
    parser = add_command(commands, "profile", run, _DESCRIPTION)
    parser.add_argument("--model", metavar="NAME", help="also its steps: folder, hub name, bundled")
    parser.add_argument("--draft-model", metavar="NAME", help="the same for a draft model")
    parser.add_argument(
        "--output",
        default=_DEFAULT_PATH,
        metavar="PATH",
        help=f"the profile, which advise --hardware reads (default: {_DEFAULT_PATH})",
    )
    parser.add_argument("--name", help="what to call the machine (default: its device)")
    dtypes = ("auto", "float32", "bfloat16", "float16")
    parser.add_argument("--dtype", default="auto", choices=dtypes, help="auto: the model's")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, ...; auto: GPU if any")
    grid = parser.add_argument_group("grid of steps, each a list such as 1,4,16")
    for option, default in (
        ("--batch", _BATCH_SIZES),
        ("--tokens", _TOKENS_PER_REQUEST),
        ("--context", _CONTEXT_TOKENS),
    ):
        shown = ",".join(map(str, default))
        grid.add_argument(
            option, type=_counts, default=default, metavar="N,...", help=f"default: {shown}"
        )
    grid.add_argument(
        "--rounds",
        type=int,
        default=5,
        metavar="N",
        help="times that every step is measured (default 5)",
    )
    grid.add_argument(
        "--seconds",
        type=float,
        default=_MOST_SECONDS,
        help=f"begin no further round after so long, per model (default {_MOST_SECONDS:g})",
    )


def run(options: argparse.Namespace) -> int:
    """Measure, write, say what was found."""
    _check(options)
    from sdcontrol.engine.profiling import describe_machine
    from sdcontrol.integrations.loading import device_of

    device = device_of(options.device)
    models = _load_models(options)
    dtype = _dtype(options, models)
    machine = describe_machine(device)
    profile = MachineProfile(
        sdcontrol_version=__version__,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=machine,
        dtype=str(dtype).removeprefix("torch."),
        hardware=_hardware(as_text(options.name or str(machine["device"])), device, dtype),
        models=_measure_models(models, options),
    )
    for path in filter(None, (options.output, options.json)):
        _write(profile, Path(path))
    print(*_lines(profile, options.output), sep="\n")
    return 0


# ---- options


def _counts(text: str) -> tuple[int, ...]:
    counts = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    if min(counts) < 1:
        raise ValueError(text)
    return counts


_counts.__name__ = "list of counts"  # as argparse calls it where a value is none


def _check(options: argparse.Namespace) -> None:
    if options.rounds < 1:
        raise ConfigError(f"--rounds is {options.rounds}; give at least 1")
    if not options.seconds >= 0.0:
        raise ConfigError(f"--seconds is {options.seconds}; give at least 0")
    check_writable(options.output, options.json)


def _load_models(options: argparse.Namespace) -> "list[tuple[Role, str, PreTrainedModel]]":
    from sdcontrol.integrations.loading import load_model

    named: list[tuple[Role, str | None]] = [
        ("target", options.model),
        ("draft", options.draft_model),
    ]
    return [
        (role, name, load_model(name, dtype=options.dtype, device=options.device, role=role))
        for role, name in named
        if name is not None
    ]


def _dtype(
    options: argparse.Namespace, models: "Sequence[tuple[Role, str, PreTrainedModel]]"
) -> "torch.dtype":
    import torch

    if options.dtype != "auto":
        dtype: torch.dtype = getattr(torch, options.dtype)
        return dtype
    return models[0][2].dtype if models else torch.bfloat16


# ---- measuring


def _hardware(name: str, device: "torch.device", dtype: "torch.dtype") -> Hardware:
    from sdcontrol.engine.ceilings import measure_ceilings

    return Hardware.seen(name, measure_ceilings(device, dtype))


def _measure_models(
    models: "Sequence[tuple[Role, str, PreTrainedModel]]", options: argparse.Namespace
) -> tuple[ModelTimes, ...]:
    from sdcontrol.engine.profiling import measure_steps, step_shapes

    grid = {
        "batch_sizes": options.batch,
        "tokens_per_request": options.tokens,
        "context_tokens": options.context,
    }
    known = [_shape_of(name, model) for _, name, model in models]  # refused before time is spent
    shapes = [step_shapes(model, **grid) for _, _, model in models]
    _say_what_is_missing(shapes, options)
    total = sum(map(len, shapes)) * (options.rounds + 1)
    times: list[ModelTimes] = []
    with _progress(total, is_shown=sys.stderr.isatty()) as advance:
        rows = zip(models, known, shapes, strict=True)
        for (role, name, model), shape, fitting in rows:
            measured = measure_steps(
                model,
                fitting,
                rounds=options.rounds,
                most_seconds=options.seconds,
                on_measured=advance,
            )
            dtype = str(model.dtype).removeprefix("torch.")
            times.append(_times(role, name, dtype, shape, measured))
    return tuple(times)


def _say_what_is_missing(
    shapes: "Sequence[Sequence[StepShape]]", options: argparse.Namespace
) -> None:
    wanted = len(options.batch) * len(options.tokens) * len(options.context)
    for fitting in shapes:
        if len(fitting) < wanted:
            print(
                f"sdcontrol: {wanted - len(fitting)} of {wanted} steps left out: they need more "
                "memory or positions than there are",
                file=sys.stderr,
            )
        if len(fitting) < LEAST_STEPS:
            print(
                f"sdcontrol: {len(fitting)} of the {LEAST_STEPS} steps that advise needs to calibrate "
                "on; give more of --batch, --tokens or --context",
                file=sys.stderr,
            )


def _shape_of(name: str, model: "PreTrainedModel") -> ModelShape:
    return from_config({**model.config.to_dict(), "dtype": str(model.dtype)}, name)


def _times(
    role: Role,
    name: str,
    dtype: str,
    shape: ModelShape,
    measured: "Sequence[StepMeasurement]",
) -> ModelTimes:
    steps = tuple(
        StepTime(
            batch_size=step.shape.batch_size,
            tokens_per_request=step.shape.tokens_per_request,
            context_tokens=step.shape.context_tokens,
            seconds=step.seconds,
        )
        for step in measured
    )
    return ModelTimes(
        role=role,
        name=name,
        dtype=dtype,
        shape=shape,
        steps=steps,
    )


@contextmanager
def _progress(total: int, *, is_shown: bool) -> Iterator[Callable[[], None]]:
    """A function to call after every forward."""
    if not is_shown or not total:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("forwards,"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)


# ---- output


def _write(profile: MachineProfile, path: Path) -> None:
    try:
        profile.write(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def _lines(profile: MachineProfile, path: str) -> list[str]:
    found = profile.hardware
    lines = [
        f"{found.name}: {found.bytes_per_second / 1e9:.4g} GB/s, "
        f"{found.flops_per_second / 1e9:.4g} GFLOP/s in {profile.dtype}, "
        f"ridge {found.ridge_flops_per_byte:.3g} FLOP/byte"
    ]
    for model in profile.models:
        lines += ["", f"{model.role} {model.name}, {model.dtype}, milliseconds of a forward:"]
        tokens = sorted({step.tokens_per_request for step in model.steps})
        heads = "".join(f"{f'{count} tokens':>11}" for count in tokens)
        lines.append(f"{'batch':>6} {'context':>8}{heads}  per request")
        lines += _rows(model, tokens)
    return [*lines, "", f"written to {path}"]


def _rows(model: ModelTimes, tokens: Sequence[int]) -> list[str]:
    times = {
        (step.batch_size, step.context_tokens, step.tokens_per_request): step.seconds
        for step in model.steps
    }
    rows: list[str] = []
    for batch, context in dict.fromkeys(key[:2] for key in times):
        cells = (times.get((batch, context, count)) for count in tokens)
        shown = "".join(f"{'-' if t is None else format(t * 1e3, '.3g'):>11}" for t in cells)
        rows.append(f"{batch:>6} {context:>8}{shown}")
    return rows
