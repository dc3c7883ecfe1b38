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
import threading
import uuid
from collections.abc import Mapping
from pathlib import Path

from pydantic import JsonValue

from sdcontrol.extras import needed

with needed():
    import pyarrow as pa

from sdcontrol.core import Observation
from sdcontrol.errors import ConfigError, TraceError
from sdcontrol.last_steps import LastSteps, told_before
from sdcontrol.logs import EventLog
from sdcontrol.traces.columns import STEPS, steps_table
from sdcontrol.traces.parts import open_whole, reading, table_bytes
from sdcontrol.traces.rows import read_steps
from sdcontrol.traces.schema import RecordedStep
from sdcontrol.whole_files import alone_in, write_whole

__all__ = ["WarmStart", "made_folder"]

_log = EventLog(__name__)
_THERE_IS_NONE = (FileNotFoundError, NotADirectoryError)
_UNWRITABLE = (  # where a disk is full, or a policy of one's own says what no column takes
    OSError,
    ArithmeticError,
    TypeError,
    ValueError,
    pa.ArrowException,
)


class WarmStart:
    """The last 1000 steps, or those that 8192 requests took part in, of this run and of those before.

    `setting` is all that must be the same for what was learnt to hold; each has a file of its own in `folder`.
    Requests' ids are replaced by numbers; of texts and tokens nothing is known. Steps may be noted in one thread
    while another saves. Raises `ConfigError` where there can be no such folder.
    """

    def __init__(self, folder: Path | str, setting: Mapping[str, JsonValue]) -> None:
        said = json.dumps(setting, sort_keys=True)
        self._place = {"warm_start_of": hashlib.sha256(said.encode()).hexdigest()}
        self.path = made_folder(folder) / f"warm-start-{self._place['warm_start_of'][:16]}.parquet"
        self._seen = LastSteps()  # of this run, that are in no file
        self._noting = threading.Lock()

    def recall(self) -> list[Observation]:
        """What earlier runs observed, oldest first, in steps from -n to -1; nothing where there is none.

        A file that is damaged, or of another version, is as good as none: it is said, and replaced in the end.
        """
        return told_before(self._found())

    def note(self, observation: Observation) -> None:
        """Keep what came of a step of this run."""
        with self._noting:
            self._seen.note(observation)

    def save(self) -> None:
        """Add what came since the last time to what is in the file by now, for the next run.

        Where that cannot be, it is said, and the old file stays.
        """
        with self._noting:
            seen, self._seen = self._seen, LastSteps()
        is_kept = False
        try:
            is_kept = not seen or self._add(seen)
        finally:
            if not is_kept:
                self._take_back(seen)

    def _add(self, seen: LastSteps) -> bool:
        """Whether these are in the file now; nobody else adds to it meanwhile."""
        try:
            with alone_in(self.path.parent):
                steps = seen.after(self._found(), uuid.uuid4().hex[:12])
                table = steps_table([RecordedStep(one) for one in steps])
                write_whole(self.path, table_bytes(table, self._place))
        except _UNWRITABLE as error:
            _log.warning("warm_start_not_kept", path=str(self.path), reason=str(error))
            return False
        return True

    def _take_back(self, seen: LastSteps) -> None:
        """For the next time, before what was noted meanwhile."""
        with self._noting:
            for one in self._seen:
                seen.note(one)
            self._seen = seen

    def _found(self) -> list[Observation]:
        try:
            with reading(self.path), open_whole(self.path, STEPS, place=self._place) as file:
                found = [step.observation for step in read_steps(file.read())]
                for one in found:
                    one.check()
        except TraceError as error:
            if not isinstance(error.__cause__, _THERE_IS_NONE):
                _log.warning("warm_start_not_read", reason=str(error), remedy="it is left out")
            return []
        return found


def made_folder(folder: Path | str) -> Path:
    """The folder, made if need be, wherever one goes from here; `ConfigError` where there can be none."""
    try:
        path = Path(folder).expanduser().absolute()
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError, ValueError) as error:  # or nobody's home, or no path at all
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"warm_start={str(folder)!r}: {why}; give a folder that can be written to"
        ) from error
    return path
