"""What a run taught, for the next one: its last observations, in a file per setting.

    kept = WarmStart("~/.cache/sdcontrol", {"target": "...", "device": "..."})
    controller.warm_start(kept.recall())
    ...                                       # kept.note(observation), step after step
    kept.save()

What a controller knows is a fold over observations, so those are what is kept: no second format, and no
state that a later version could not read. Knows nothing of engines, or of when a run ends.
"""

import hashlib
import json
import uuid
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pyarrow as pa
from pydantic import JsonValue

from sdcontrol.core import Observation
from sdcontrol.errors import ConfigError, TraceError
from sdcontrol.logs import EventLog
from sdcontrol.traces.columns import STEPS, steps_table
from sdcontrol.traces.parts import open_whole, reading, table_bytes
from sdcontrol.traces.rows import read_steps
from sdcontrol.traces.schema import RecordedStep
from sdcontrol.whole_files import write_whole

__all__ = ["MOST_ROWS", "MOST_STEPS", "WarmStart"]

MOST_STEPS = 1000  # that are kept: averages have forgotten what was before
MOST_ROWS = 8192  # requests of all of them together

_log = EventLog(__name__)


class WarmStart:
    """The last 1000 steps, or those that 8192 requests took part in, of this run and of those before.

    `setting` is all that must be the same for what was learnt to hold; each has a file of its own in `folder`,
    whose last writer wins. Requests' ids are replaced by numbers; of texts and tokens nothing is known.
    Raises `ConfigError` where there can be no such folder.
    """

    def __init__(self, folder: Path | str, setting: Mapping[str, JsonValue]) -> None:
        said = json.dumps(setting, sort_keys=True)
        self._place = {"warm_start_of": hashlib.sha256(said.encode()).hexdigest()}
        self.path = _made(folder) / f"warm-start-{self._place['warm_start_of'][:16]}.parquet"
        self._steps: deque[Observation] = deque()
        self._num_new = 0  # of them, of this run: the last ones
        self._num_rows = 0
        self._has_news = False
        self._run = uuid.uuid4().hex[:12]

    def recall(self) -> list[Observation]:
        """What earlier runs observed, oldest first, in steps from -n to -1; nothing where there is none.

        A file that is damaged, or of another version, is as good as none: it is said, and replaced in the end.
        """
        try:
            found = self._read() if self.path.exists() else []
        except TraceError as error:
            _log.warning(
                "warm_start_not_read", reason=str(error), remedy="this run begins untaught"
            )
            return []
        for number, one in enumerate(found, start=-len(found)):
            self._keep(replace(one, view=replace(one.view, step=number)))
        return list(self._steps)

    def note(self, observation: Observation) -> None:
        """Keep what came of a step of this run."""
        self._keep(observation)
        self._num_new = min(self._num_new + 1, len(self._steps))
        self._has_news = True

    def save(self) -> None:
        """Write what is kept, for the next run. Where that cannot be, it is said, and the old file stays."""
        if not self._has_news:
            return
        self._has_news = False
        num_old = len(self._steps) - self._num_new
        new = _renamed(islice(self._steps, num_old, None), self._run)
        steps = [RecordedStep(one) for one in (*islice(self._steps, num_old), *new)]
        try:
            write_whole(self.path, table_bytes(steps_table(steps), self._place))
        except (OSError, pa.ArrowException, TraceError) as error:
            _log.warning("warm_start_not_kept", path=str(self.path), reason=str(error))

    def _keep(self, observation: Observation) -> None:
        self._steps.append(observation)
        self._num_rows += len(observation.view.requests)
        while len(self._steps) > MOST_STEPS or (
            self._num_rows > MOST_ROWS and len(self._steps) > 1
        ):
            self._num_rows -= len(self._steps.popleft().view.requests)

    def _read(self) -> list[Observation]:
        with reading(self.path), open_whole(self.path, STEPS, place=self._place) as file:
            return [step.observation for step in read_steps(file.read())]


def _made(folder: Path | str) -> Path:
    path = Path(folder).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"warm_start={str(folder)!r}: {error.strerror}; give a folder that can be written to"
        ) from error
    return path


def _renamed(observations: Iterable[Observation], run: str) -> list[Observation]:
    """Their requests numbered, so that those of the next run are others, and no name is kept."""
    numbers: dict[str, str] = {}
    renamed: list[Observation] = []
    for one in observations:
        for request in one.view.requests:
            numbers.setdefault(request.id, f"{run}-{len(numbers)}")
        requests = tuple([replace(r, id=numbers[r.id]) for r in one.view.requests])
        renamed.append(replace(one, view=replace(one.view, requests=requests)))
    return renamed
