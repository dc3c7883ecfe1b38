"""A run's folder: its settings, where it ran, and one file per finished block.

    config.yaml   place.json   blocks/00000.json ...   results.json   report.html

Every file is written at one stroke. Knows files; nothing of how blocks come about.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import ValidationError

from sdcontrol.errors import ConfigError
from sdcontrol.experiments.config import Experiment
from sdcontrol.experiments.records import BlockRecord, Place
from sdcontrol.experiments.results import Record, Results, write_atomically
from sdcontrol.whole_files import held

__all__ = ["RunFolder"]

_Kind = TypeVar("_Kind", bound=Record)


class RunFolder:
    """The folder of a run; nothing is written or removed before `begin`.

    Raises `ConfigError` where it holds another run, or this one and neither `resume` nor
    `overwrite` is asked for.
    """

    def __init__(
        self, path: Path, experiment: Experiment, *, resume: bool = False, overwrite: bool = False
    ) -> None:
        self.path = path
        self._config = path / "config.yaml"
        self._experiment = experiment
        self._overwrite = overwrite
        try:
            if self._config.exists() and not overwrite:
                self._check_same(experiment, resume)
        except OSError as error:
            raise self._unusable(error) from error

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the folder while a comparison runs; raises `ConfigError` where one runs here already."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unusable(error) from error
        with held(self.path) as is_ours:
            if not is_ours:
                raise ConfigError(
                    f"{self.path}: a comparison is running here; wait until it has ended, or name "
                    "another folder with --output"
                )
            yield

    def begin(self) -> None:
        """Write the settings, and remove an earlier run where that was asked for."""
        try:
            if self._overwrite:
                self._empty()
            if not self._config.exists():
                settings = self._experiment.resolved()
                text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
                write_atomically(self._config, text)
        except OSError as error:
            raise self._unusable(error) from error

    @property
    def results_path(self) -> Path:
        """Of `Results`."""
        return self.path / "results.json"

    def blocks(self) -> list[BlockRecord]:
        """The finished blocks in order; raises `ConfigError` for a file that is none."""
        found = [_read(path, BlockRecord) for path in sorted(self._blocks())]
        for number, record in enumerate(found):
            if record.block != number:
                raise ConfigError(
                    f"{self.path}: block {number} is missing; begin anew with --overwrite"
                )
        return found

    def add_block(self, record: BlockRecord) -> None:
        """From now on it is finished."""
        path = self.path / "blocks" / f"{record.block:05d}.json"
        write_atomically(path, record.model_dump_json() + "\n")

    def place(self) -> Place | None:
        """Where the run began."""
        path = self.path / "place.json"
        return _read(path, Place) if path.exists() else None

    def set_place(self, place: Place) -> None:
        """Where it runs."""
        write_atomically(self.path / "place.json", place.model_dump_json(indent=1) + "\n")

    def write_results(self, results: Results) -> None:
        """So far, or final."""
        results.dump(self.results_path)

    def _blocks(self) -> list[Path]:
        return list((self.path / "blocks").glob("[0-9]*.json"))

    def _empty(self) -> None:
        """Remove what a run writes, and nothing else, in an order that leaves a run cut short, wherever it ends."""
        names = ("place.json", "results.json", "report.html", "config.yaml")
        blocks = sorted(self._blocks(), reverse=True)
        for path in (*blocks, *(self.path / name for name in names)):
            path.unlink(missing_ok=True)

    def _unusable(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"{self.path} cannot be used: {error.strerror}; name another folder with --output"
        )

    def _check_same(self, experiment: Experiment, resume: bool) -> None:
        if not resume:
            raise ConfigError(
                f"{self.path} holds a run; go on with --resume, begin anew with --overwrite, or "
                "name another folder with --output"
            )
        try:
            before = yaml.safe_load(self._config.read_text("utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self._config} is damaged; begin anew with --overwrite") from error
        different = _difference(before, experiment.resolved())
        if different:
            raise ConfigError(
                f"{self.path} holds a run with another {different}; looks are planned before a run "
                "begins, so settings stay as they are: name another folder with --output"
            )


def _difference(before: object, now: Mapping[str, object]) -> str:
    """The first key whose values differ, or ""."""
    if not isinstance(before, dict):
        return "config"
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    return str(keys[0]) if keys else ""


def _read(path: Path, kind: type[_Kind]) -> _Kind:
    try:
        return kind.model_validate_json(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        raise ConfigError(f"{path} is damaged; begin anew with --overwrite") from error
