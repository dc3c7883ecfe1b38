"""Write docs/reference/ from docstrings, settings and commands: `python docs/make_reference.py`.

What is said of a name is read from its source text, so that the pages are alike in every version
of Python. Knows which names are public; says nothing of its own about them.
"""

import argparse
import ast
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from inspect import cleandoc
from pathlib import Path
from textwrap import dedent
from types import NoneType, UnionType
from typing import Annotated, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

import sdcontrol
from sdcontrol import cli, policies
from sdcontrol.engine.config import EngineConfig
from sdcontrol.experiments import config as experiment
from sdcontrol.experiments import metrics, workload_settings
from sdcontrol.policies.registry import _CONFIGS
from sdcontrol.traces.simulate import SimulationSettings
from sdcontrol.traces.slo import SLO

_MADE = "Made by `python docs/make_reference.py` from the source; edit that, not this.\n"

_TOOLS = {
    "What the engine counted": "engine.stats engine.history",
    "Policies": "policies.base policies.registry",
    "Drafters": "engine.drafters.base engine.drafters.checks",
    "Traces": "traces.recorder traces.reader traces.replay traces.inspect traces.follow "
    "traces.bundled",
    "What-if replay": "traces.what_if traces.workload traces.workloads traces.step_times "
    "traces.replay_result traces.acceptance_table engine.acceptance_rollouts",
    "Importers": "traces.importers.azure traces.importers.mooncake traces.importers.texts "
    "traces.importers.vllm traces.importers.rows",
    "Learning offline": "policies.learned_model",
    "Metrics for Prometheus": "integrations.prometheus",
}
_SETTINGS: dict[str, tuple[type[BaseModel], ...]] = {
    "Engine": (EngineConfig,),
    "A comparison": (
        experiment.Experiment,
        experiment.Arm,
        experiment.Warmup,
        experiment.Slo,
        experiment.Stopping,
        workload_settings.Workload,
        workload_settings.ClosedLoop,
        workload_settings.OpenLoop,
        workload_settings.Recorded,
        workload_settings.Sampling,
    ),
    "A what-if replay": (SimulationSettings, SLO),
}
_LIMITS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
_LIMITS |= {"min_length": "length at least", "max_length": "length at most"}


# ---- names, from their source


@cache
def _source(module: str) -> str:
    spec = find_spec(module)
    return Path(str(spec and spec.origin)).read_text("utf-8")


@cache
def _module(name: str) -> ast.Module:
    return ast.parse(_source(name))


def _public(module: str) -> list[str]:
    """The names of its `__all__`, in the order of the source."""
    tree = _module(module)
    listed = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return [
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in listed
    ]


def _entry(module: str, name: str) -> Iterator[str]:
    """What is said of a public name: docstring, fields and methods."""
    node = next(n for n in _module(module).body if getattr(n, "name", None) == name)
    if isinstance(node, ast.FunctionDef):
        yield f"### `{name}{_signature(node)}`\n\n`{module}`\n\n{_docstring(node)}"
        return
    assert isinstance(node, ast.ClassDef), name
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    yield f"### `{name}`\n\n`{module}`" + (f", a `{bases}`" if bases else "")
    yield _docstring(node)
    lines = _source(module).splitlines()
    fields = [n for n in node.body if isinstance(n, ast.AnnAssign) and _is_public(n)]
    if fields:
        yield "\n".join(_field(field, lines) for field in fields)
    methods = [n for n in node.body if isinstance(n, ast.FunctionDef)]
    shown = [_method(m) for m in methods if m.name == "__init__" or not m.name.startswith("_")]
    if shown:
        yield "\n".join(shown)


def _is_public(node: ast.AnnAssign) -> bool:
    return not ast.unparse(node.target).startswith("_")


def _field(node: ast.AnnAssign, lines: Sequence[str]) -> str:
    comment = lines[(node.end_lineno or node.lineno) - 1].partition("  # ")[2]
    following = lines[node.end_lineno or node.lineno].strip()
    if not comment and following.startswith("# ^"):
        comment = following.removeprefix("# ^").strip()
    words = f": {comment}" if comment else ""
    if isinstance(node.value, ast.Call):  # such as field(default_factory=dict): says nothing
        node = ast.AnnAssign(node.target, node.annotation, None, node.simple)
    return f"- `{ast.unparse(node)}`{words}"


def _method(node: ast.FunctionDef) -> str:
    words = " ".join(_docstring(node).split())
    if any(ast.unparse(mark) == "property" for mark in node.decorator_list):
        returns = f": {ast.unparse(node.returns)}" if node.returns else ""
        return f"- `{node.name}{returns}` (property)" + (f": {words}" if words else "")
    name = "constructor" if node.name == "__init__" else node.name
    return f"- `{name}{_signature(node)}`" + (f": {words}" if words else "")


def _signature(node: ast.FunctionDef) -> str:
    arguments = ast.unparse(node.args)
    for own in ("self, ", "cls, ", "self", "cls"):
        arguments = arguments.removeprefix(own)
    is_maker = node.name == "__init__" or node.returns is None
    return f"({arguments})" + ("" if is_maker else f" -> {ast.unparse(node.returns)}")


def _docstring(node: ast.ClassDef | ast.FunctionDef | ast.Module) -> str:
    return cleandoc(ast.get_docstring(node) or "")


# ---- settings


def _model(model: type[BaseModel], name: str = "") -> Iterator[str]:
    yield f"### `{name or model.__name__}`\n\n`{model.__module__}`\n\n{cleandoc(model.__doc__ or '')}"
    fields = {name: field for name, field in model.model_fields.items() if name != "kind"}
    rows = [_row(key, field) for key, field in fields.items()]
    if rows:
        yield "\n".join(["| key | type | default | |", "|---|---|---|---|", *rows])


def _row(name: str, field: FieldInfo) -> str:
    limits = [_limit(item) for item in field.metadata]
    words = ", ".join(filter(None, [*limits, field.description or ""]))
    cells = (f"`{name}`", f"`{_type(field.annotation)}`", _default(field), words)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _limit(item: object) -> str:
    for key, words in _LIMITS.items():
        if hasattr(item, key) and getattr(item, key) is not None:
            return f"{words} {getattr(item, key)}"
    return ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "needed"
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined or isinstance(value, BaseModel):
        return "its defaults"
    return f"`{value!r}`"


def _type(annotation: object) -> str:
    """A type in few words, alike in every version of Python."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0])
    if origin in (Union, UnionType):
        return " or ".join(_type(argument) for argument in arguments)
    if annotation is NoneType or isinstance(annotation, str):
        return repr(annotation) if annotation is not NoneType else "None"
    if origin is None:
        return getattr(annotation, "__name__", str(annotation))
    name = str(getattr(origin, "__name__", None) or str(origin).rpartition(".")[2])
    inner = ["..." if a is Ellipsis else _type(a) for a in arguments]
    return " or ".join(inner) if "Literal" in str(origin) else f"{name}[{', '.join(inner)}]"


# ---- commands


def _commands() -> Iterator[str]:
    parser = cli._parser()
    yield parser.description or ""
    codes = (ast.get_docstring(_module("sdcontrol.cli")) or "").split("\n\n")[1]
    yield f"```text\n{dedent(codes)}\n```"
    actions = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    for name, command in sorted(actions[0].choices.items()):
        yield f"## `sdcontrol {name}`"
        yield command.description or ""
        for group in command._action_groups:
            options = [a for a in group._group_actions if a.help != argparse.SUPPRESS]
            if options:
                yield f"{(group.title or 'options').capitalize()}:"
                yield "\n".join(_option(action) for action in options)
        if command.epilog:
            yield command.epilog


def _option(action: argparse.Action) -> str:
    value = action.metavar or (
        "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper()
    )
    if not action.option_strings:
        name = str(value)
    else:
        name = ", ".join(action.option_strings) + ("" if action.nargs == 0 else f" {value}")
    words = (action.help or "").replace("%%", "%")
    return f"- `{name}`" + (f": {words}" if words else "")


# ---- pages


def _api() -> Iterator[str]:
    yield "# Names\n\n" + _MADE
    yield "## `sdcontrol`\n\nWhat `import sdcontrol` offers; torch is loaded on first use."
    for name in sorted(set(sdcontrol.__all__) - {"policies"}):
        yield from _entry(_home(name), name)
    yield "## `sdcontrol.core`, the rest of it"
    for name in _public("sdcontrol.core"):
        if name not in sdcontrol.__all__:
            yield from _entry("sdcontrol.core", name)
    for title, modules in _TOOLS.items():
        yield f"## {title}"
        for module in modules.split():
            for name in _public(f"sdcontrol.{module}"):
                yield from _entry(f"sdcontrol.{module}", name)


def _home(name: str) -> str:
    """The module of a name of `sdcontrol`, found without loading torch."""
    late = sdcontrol._LOADED_ON_FIRST_USE.get(name)
    return late or str(getattr(sdcontrol, name).__module__)


def _policies() -> Iterator[str]:
    yield "# Policies and their settings\n\n" + _MADE
    yield "What may be said of a policy in `policy=...`, in a comparison's file and to `Controller`."
    for name in policies.names():
        yield from _model(_CONFIGS[name], name)


def _settings() -> Iterator[str]:
    yield "# Settings\n\n" + _MADE
    for title, models in _SETTINGS.items():
        yield f"## {title}"
        for model in models:
            yield from _model(model)
    yield "## Metrics of a comparison"
    rows = [
        f"| `{name}` | {metric.unit} | {'yes' if metric.is_comparable else 'no'} |"
        for name, metric in metrics.METRICS.items()
    ]
    yield "\n".join(["| name | unit | may be compared |", "|---|---|---|", *rows])


def pages() -> dict[str, str]:
    """The text of every page, by file name."""
    made = {
        "names.md": _api(),
        "policies.md": _policies(),
        "settings.md": _settings(),
        "commands.md": iter(["# Commands\n\n" + _MADE, *_commands()]),
    }
    return {name: "\n\n".join(p.strip() for p in parts) + "\n" for name, parts in made.items()}


def main(folder: Path = Path(__file__).parent / "reference") -> None:
    """Write them."""
    for name, text in pages().items():
        (folder / name).write_text(text, "utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
