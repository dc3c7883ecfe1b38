"""What a run taught, for the next one: its last observations, in a file per setting.

    kept = WarmStart("~/.cache/sdcontrol", {"target": "...", "device": "..."})
    controller.warm_start(kept.recall())
    ...                                       # kept.note(observation), step after step
    kept.save()

What a controller knows is a fold over observations, so those are what is kept: no second format, and nothing
that hangs on how they are learnt from. Knows nothing of engines, or of when a run ends.
"""

import hashlib
import json
import uuid
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
from pydantic import JsonValue

from sdcontrol.core import Observation
from sdcontrol.errors import ConfigError, TraceError
from sdcontrol.last_steps import LastSteps, told_before
from sdcontrol.logs import EventLog
from sdcontrol.traces.columns import STEPS, steps_table
from sdcontrol.traces.parts import open_whole, reading, table_bytes
from sdcontrol.traces.rows import read_steps
from sdcontrol.traces.schema import RecordedStep
from sdcontrol.whole_files import write_whole

__all__ = ["WarmStart", "made_folder"]

_log = EventLog(__name__)


class WarmStart:
    """The last 1000 steps, or those that 8192 requests took part in, of this run and of those before.

    `setting` is all that must be the same for what was learnt to hold; each has a file of its own in `folder`.
    Requests' ids are replaced by numbers; of texts and tokens nothing is known.
    Raises `ConfigError` where there can be no such folder.
    """

    def __init__(self, folder: Path | str, setting: Mapping[str, JsonValue]) -> None:
        said = json.dumps(setting, sort_keys=True)
        self._place = {"warm_start_of": hashlib.sha256(said.encode()).hexdigest()}
        self.path = made_folder(folder) / f"warm-start-{self._place['warm_start_of'][:16]}.parquet"
        self._seen = LastSteps()  # of this run, that are in no file

    def recall(self) -> list[Observation]:
        """What earlier runs observed, oldest first, in steps from -n to -1; nothing where there is none.

        A file that is damaged, or of another version, is as good as none: it is said, and replaced in the end.
        """
        return told_before(self._found())

    def note(self, observation: Observation) -> None:
        """Keep what came of a step of this run."""
        self._seen.note(observation)

    def save(self) -> None:
        """Add what came since the last time to what is in the file by now, for the next run.

        Where that cannot be, it is said, and the old file stays.
        """
        if not self._seen:
            return
        run = uuid.uuid4().hex[:12]
        steps = [RecordedStep(one) for one in self._seen.after(self._found(), run)]
        try:
            write_whole(self.path, table_bytes(steps_table(steps), self._place))
        except (OSError, pa.ArrowException) as error:
            _log.warning("warm_start_not_kept", path=str(self.path), reason=str(error))
            return
        self._seen.clear()

    def _found(self) -> list[Observation]:
        if not self.path.exists():
            return []
        try:
            with reading(self.path), open_whole(self.path, STEPS, place=self._place) as file:
                found = [step.observation for step in read_steps(file.read())]
                for one in found:
                    one.check()
        except TraceError as error:
            _log.warning("warm_start_not_read", reason=str(error), remedy="it is left out")
            return []
        return found


def made_folder(folder: Path | str) -> Path:
    """The folder, made if need be; `ConfigError` where there can be none."""
    path = Path(folder).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"warm_start={str(folder)!r}: {error.strerror}; give a folder that can be written to"
        ) from error
    return path
