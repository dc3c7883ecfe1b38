"""The options of `sdcontrol replay`, and what they mean together: jobs, machines, where runs go.

Knows options and their mistakes; nothing of simulations or results.
"""

import argparse
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from sdcontrol.cli.advice_inputs import find_machine, find_shape
from sdcontrol.cli.command import Parser
from sdcontrol.cli.files import check_writable, find_trace
from sdcontrol.errors import ConfigError

if TYPE_CHECKING:
    from sdcontrol.estimators.machine_profile import MachineProfile
    from sdcontrol.estimators.roofline import Forward
    from sdcontrol.experiments.parallel import Pool
    from sdcontrol.experiments.replay_runs import Machine, ReplayJob
    from sdcontrol.experiments.sources import Source

__all__ = ["add_options", "base_jobs", "check_options", "policies_of", "pool_of", "source_of"]

_FORMATS = ("trace", "azure", "mooncake", "vllm", "text", "generated")
_DEFAULT_POLICIES = ("goodput", "off")
_SETTINGS = {
    "batch_size": "max_batch_size",
    "prefill_tokens": "max_prefill_tokens",
    "kv_tokens": "kv_tokens",
}


def add_options(parser: Parser) -> None:
    """All options of the command."""
    parser.add_argument(
        "traces",
        nargs="+",
        metavar="TRACE",
        help="a trace's folder (with an acceptance table), bundled:NAME, a recording of another "
        "kind, or the YAML of a generated workload; one or more",
    )
    parser.add_argument(
        "--exact",
        action="store_true",
        help="make every recorded decision again and compare; exit code 1 where any differs",
    )
    _add_what(parser)
    _add_machine(parser)
    _add_running(parser)


def _add_what(parser: Parser) -> None:
    add = parser.add_argument_group("what is simulated").add_argument
    add(
        "--policy",
        action="append",
        metavar="NAME",
        help="goodput, off, static:DRAFTER:TOKENS, learned:PATH, oracle, ...; may be repeated; "
        "default: goodput and off",
    )
    add("--format", choices=_FORMATS, help="of the files; default: as suffix and keys say")
    add("--tokenizer", metavar="PATH", help="a tokenizer.json, for texts")
    add("--arrivals", metavar="TRACE", help="take the times of arrival from there")
    add("--load", type=float, default=1.0, metavar="X", help="arrivals X times as fast")
    add("--requests", type=int, metavar="N", help="only the first N requests")
    add("--seeds", type=int, default=1, metavar="N", help="so many runs of each policy")
    add("--slo-ttft", type=float, metavar="SECONDS", help="limit: to a request's first token")
    add("--slo-tpot", type=float, metavar="SECONDS", help="limit: per token after the first")


def _add_machine(parser: Parser) -> None:
    group = parser.add_argument_group("machine (default: step times are fitted to the trace)")
    add = group.add_argument
    add("--hardware", metavar="NAME|PATH", help="a GPU's name, or a file of sdcontrol profile")
    add("--model", metavar="NAME|PATH", help="common model, config.json or its folder, bundled")
    add("--draft-model", metavar="NAME|PATH", help="likewise; prices the arm draft_model")
    add("--tensor-parallel", type=int, metavar="N", help="devices of --model (default 1)")
    add("--noise", type=float, default=0.0, metavar="X", help="step times vary by this share")
    add("--batch-size", type=int, metavar="N", help="requests decoded together")
    add("--prefill-tokens", type=int, metavar="N", help="prompt tokens in a step")
    add("--kv-tokens", type=int, metavar="N", help="tokens that the KV cache holds")


def _add_running(parser: Parser) -> None:
    add = parser.add_argument_group("running").add_argument
    add("--workers", type=int, metavar="N", help="runs at a time (default: one per core)")
    add(
        "--ray",
        nargs="?",
        const="local",
        metavar="ADDRESS",
        help="run on Ray: the cluster at ADDRESS, which must see the same files, or on this machine",
    )
    add("--html", metavar="PATH", help="write a page with plots over time")


def check_options(options: argparse.Namespace) -> None:
    """Raise `ConfigError` for what cannot be, before anything is read."""
    read = [*options.traces, options.arrivals, options.tokenizer, options.hardware, options.model]
    learned = [name.removeprefix("learned:") for name in options.policy or ()]
    check_writable(options.json, options.html, inputs=[*read, options.draft_model, *learned])
    for name in ("requests", "seeds", "workers", "tensor_parallel", *_SETTINGS):
        _check(options, name, "at least 1", lambda value: value >= 1)
    for name in ("load", "slo_ttft", "slo_tpot"):
        _check(options, name, "a number above 0", lambda value: 0.0 < value < float("inf"))
    _check(options, "noise", "a share from 0 to 1", lambda value: 0.0 <= value <= 1.0)
    if options.exact:
        _check_exact(options)
    _check_machine(options)


def _check_exact(options: argparse.Namespace) -> None:
    """Nothing is simulated, so whatever is said of a simulation is refused."""
    plain = Parser(add_help=False)
    for add in (_add_what, _add_machine, _add_running):
        add(plain)
    defaults = vars(plain.parse_args([])).items()
    said = [_option(name) for name, default in defaults if getattr(options, name) != default]
    if said:
        raise ConfigError(f"--exact replays what was recorded; leave out {', '.join(said)}")


def _check_machine(options: argparse.Namespace) -> None:
    """A model and what depends on it price a machine."""
    names = ("model", "draft_model", "tensor_parallel")
    said = [name for name in names if getattr(options, name) is not None]
    for needed in ("hardware", "model"):
        if said and needed not in said and getattr(options, needed) is None:
            shown = " and ".join(map(_option, said))
            raise ConfigError(f"{shown}: of no use without {_option(needed)}; give that too")


def _check(
    options: argparse.Namespace, name: str, limit: str, holds: Callable[[float], bool]
) -> None:
    value = getattr(options, name)
    if value is not None and not holds(value):
        raise ConfigError(f"{_option(name)} is {value}; give {limit}")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def policies_of(options: argparse.Namespace) -> list[str]:
    """The policies asked for. Raises `ConfigError` for what is none."""
    from sdcontrol.experiments.replay_runs import check_policies

    names = list(options.policy or _DEFAULT_POLICIES)
    check_policies(names)
    return names


def base_jobs(options: argparse.Namespace) -> "list[ReplayJob]":
    """A job for every source, of no policy yet. Raises `ConfigError`."""
    from sdcontrol.experiments.replay_runs import ReplayJob
    from sdcontrol.traces.slo import SLO

    machine = _machine(options)
    arrivals = None if options.arrivals is None else source_of(options.arrivals, options, None)
    given = ((field, getattr(options, name)) for name, field in _SETTINGS.items())
    settings = tuple((field, value) for field, value in given if value is not None)
    found = [source_of(trace, options, options.format) for trace in options.traces]
    for source in found:
        if found.count(source) > 1:
            raise ConfigError(f"{source.path} stands there twice; give it once")
        if machine is None and source.format != "trace":
            raise ConfigError(
                f"{source.path} is no trace of sdcontrol, so there are no steps to fit step times "
                "to; give --hardware and --model, or a profile as --hardware"
            )
    return [
        ReplayJob(
            source,
            policy="",
            arrivals=arrivals,
            load=options.load,
            num_requests=options.requests,
            machine=machine,
            relative_noise=options.noise,
            slo=SLO(ttft_seconds=options.slo_ttft, tpot_seconds=options.slo_tpot),
            settings=settings,
        )
        for source in found
    ]


def source_of(given: str, options: argparse.Namespace, kind: str | None) -> "Source":
    """Where requests come from; `kind` None: as the file says. Raises `ConfigError`."""
    from sdcontrol.experiments.sources import FORMATS, Source, format_of
    from sdcontrol.traces.importers.rows import check_plain

    path = find_trace(given)
    check_plain(path)  # its resolved name may not be there
    path = Path(os.path.realpath(path))  # of a link that leads to itself, too
    known = next((known for known in FORMATS if known == kind), None)
    return Source(path, known or format_of(path), options.tokenizer or "")


def pool_of(options: argparse.Namespace) -> "Pool":
    """Where runs go."""
    from sdcontrol.experiments.parallel import Pool

    return Pool(options.workers or os.cpu_count() or 1, options.ray)


def _machine(options: argparse.Namespace) -> "Machine | None":
    from sdcontrol.estimators.roofline import Forward
    from sdcontrol.experiments.replay_runs import Machine

    if options.hardware is None:
        return None
    hardware, profile = find_machine(options.hardware)
    if options.model is None:
        if profile is None:
            raise ConfigError("--hardware needs --model: a common model's name or a config.json")
        return Machine(hardware.name, profile=Path(options.hardware).resolve())
    devices = options.tensor_parallel or 1
    target = Forward(find_shape(options.model, "target"), hardware, devices)
    target = _calibrated(target, profile)
    draft = None
    if options.draft_model is not None:
        shape = find_shape(options.draft_model, "draft")
        devices = min(devices, shape.num_kv_heads)
        draft = _calibrated(Forward(shape, hardware, devices, target.calibration), profile)
    name = f"{target.shape.name} on {hardware.name}"
    return Machine(name, target=target, draft=draft)


def _calibrated(forward: "Forward", profile: "MachineProfile | None") -> "Forward":
    """On the profile's measured steps, where there is one."""
    if profile is None:
        return forward
    return replace(forward, calibration=profile.calibration(forward.shape))
