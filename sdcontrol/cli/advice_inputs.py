"""What `sdcontrol advise` is given, made into values: machines, shapes, plain steps, acceptance rates.

Knows names, files and their mistakes, each of which is one line that says what would be valid.
"""

import csv
import difflib
import json
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path

from sdcontrol.errors import ConfigError, UnknownName
from sdcontrol.estimators import hardware as hardware_table
from sdcontrol.estimators import shapes as shape_table
from sdcontrol.estimators.calibration import PlainStep, read_plain_steps
from sdcontrol.estimators.config_numbers import MOST
from sdcontrol.estimators.hardware import Hardware
from sdcontrol.estimators.machine_profile import LEAST_STEPS, MachineProfile, read_profile
from sdcontrol.estimators.shapes import ModelShape

__all__ = ["ASSUMED_RATES", "acceptance_rates", "find_machine", "find_shape", "plain_steps"]

_BUNDLED = "bundled"
_LEAST_SECONDS = 1e-9  # of a step
_SPARSE = re.compile(r"sparse_kv:[1-9][0-9]{0,8}(:scored)?")
ASSUMED_RATES = {"ngram": 0.3, "sparse_kv:512": 0.8, "draft_model": 0.7}
"""Acceptance rates where none are given; a report says so."""


def find_machine(given: str) -> tuple[Hardware, MachineProfile | None]:
    """A device of the table, or the machine of a profile, and that profile.

    Raises `UnknownName` for another name, `ConfigError` for a file that is no profile.
    """
    path = Path(given)
    if path.suffix == ".json" or path.is_file():
        profile = read_profile(path)
        return profile.hardware, profile
    try:
        return hardware_table.by_name(given), None
    except UnknownName as error:
        if given.lower() == "cpu":  # said already what to do
            raise
        near = _nearest(given, hardware_table.HARDWARE)
        raise UnknownName(
            f"hardware {given!r} is not known; did you mean {near}? All: "
            f"{', '.join(hardware_table.HARDWARE)}, or a file that sdcontrol profile wrote"
        ) from error


def find_shape(given: str, role: str) -> ModelShape:
    """From the table, a `config.json` or its folder, or the bundled model of this role.

    Raises `UnknownName` for another name, `ConfigError` for a file that is missing or describes no model.
    """
    path = Path(given)
    if given == _BUNDLED:
        from sdcontrol.engine.bundled import bundled_path

        return _read_shape(bundled_path(role) / "config.json", _BUNDLED)
    if path.is_dir():
        return _read_shape(path / "config.json", path.resolve().name)
    if path.suffix == ".json" or path.is_file():
        return _read_shape(
            path, path.stem if path.stem != "config" else Path(os.path.abspath(path)).parent.name
        )
    if given.startswith((".", "/", "~")):
        raise ConfigError(f"no model folder or config.json {given!r}")
    try:
        return shape_table.by_name(given)
    except UnknownName as error:
        near = _nearest(given.lower().rpartition("/")[2], shape_table.SHAPES)
        raise UnknownName(
            f"model {given!r} is not known; did you mean {near}? The config.json of any model works too"
        ) from error


def _read_shape(path: Path, name: str) -> ModelShape:
    try:
        config = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds no JSON object; give a transformers config.json")
    try:
        return shape_table.from_config(config, name)
    except ConfigError as error:
        raise ConfigError(f"{path} describes no model that can be priced: {error}") from error


def plain_steps(given: str | None) -> list[PlainStep]:
    """The steps in a CSV; none without a file.

    Raises `ConfigError` where it cannot be read, has too few to fit, or has such as no machine takes.
    """
    if given is None:
        return []
    try:
        steps = read_plain_steps(Path(given))
    except OSError as error:
        raise ConfigError(f"{given} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{given} is no UTF-8 text: {error.reason}") from error
    except csv.Error as error:
        raise ConfigError(f"{given} is no CSV: {error}") from error
    loads = {(step.batch_size, step.context_tokens) for step in steps}
    if len(loads) < LEAST_STEPS:
        raise ConfigError(
            f"{given} has plain steps at {len(loads)} different loads (batch size and context); give at "
            f"least {LEAST_STEPS}"
        )
    for step in steps:
        if step.seconds < _LEAST_SECONDS or max(step.batch_size, step.context_tokens) > MOST:
            raise ConfigError(
                f"{given} has a step of {step.batch_size:.3g} requests of {step.context_tokens:.3g} "
                f"tokens in {step.seconds:.3g} s; give at most {MOST:.0e} and at least {_LEAST_SECONDS} s"
            )
    return steps


def acceptance_rates(
    given: str | None, *, has_draft_model: bool
) -> tuple[dict[str, float], list[str]]:
    """Acceptance rates by drafter, and the drafters for which nobody gave one.

    Raises `ConfigError` for what is no rate from 0 to 1, `UnknownName` for what is no drafter.
    """
    rates = {} if given is None else _parse_rates(given)
    if "draft_model" in rates and not has_draft_model:
        raise ConfigError("--acceptance names draft_model; give --draft-model NAME|PATH too")
    wanted = ASSUMED_RATES if given is None else {"draft_model": ASSUMED_RATES["draft_model"]}
    assumed = {
        arm: rate
        for arm, rate in wanted.items()
        if arm not in rates and (arm != "draft_model" or has_draft_model)
    }
    return rates | assumed, list(assumed)


def _parse_rates(text: str) -> dict[str, float]:
    rates: dict[str, float] = {}
    for part in text.split(","):
        arm, equals, rate = (piece.strip() for piece in part.rpartition("="))
        if not equals:
            raise ConfigError(f"--acceptance {part!r}: write DRAFTER=RATE, such as ngram=0.4")
        _check_arm(arm)
        if arm in rates:
            raise ConfigError(f"--acceptance names {arm} twice; name it once")
        rates[arm] = _rate(arm, rate)
    return rates


def _rate(arm: str, text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not 0.0 <= rate <= 1.0:
        raise ConfigError(f"--acceptance of {arm} is {text!r}; give a number from 0 to 1")
    return rate


def _check_arm(arm: str) -> None:
    if not _SPARSE.fullmatch(arm) and arm not in ("ngram", "draft_model"):
        near = _nearest(arm.partition(":")[0], ("ngram", "sparse_kv", "draft_model"), count=1)
        near = near.replace("sparse_kv", "sparse_kv:<tokens>")
        raise UnknownName(
            f"no drafter is called {arm!r}; did you mean {near}? Valid: ngram, sparse_kv:<tokens>, "
            "draft_model"
        )


def _nearest(name: str, valid: Iterable[str], count: int = 3) -> str:
    names = list(valid)
    lowered = {known.lower(): known for known in names}
    close = difflib.get_close_matches(name.lower(), lowered, n=count, cutoff=0.0)
    return " or ".join(lowered[match] for match in close)
