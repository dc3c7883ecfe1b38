"""Progress on a terminal. Knows counts of prompts, or other units, and of tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

__all__ = ["Progress", "progress"]


class Progress:
    """Shows nothing."""

    def advance(self, num_tokens: int, *, has_ended: bool) -> None:
        """So many tokens more, and perhaps a unit has ended."""


@contextmanager
def progress(total: int, *, is_shown: bool, unit: str = "prompts") -> Iterator[Progress]:
    """Progress over `total` units, on standard error; or none."""
    if not is_shown:
        yield Progress()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit + ", {task.fields[tokens]} tokens,"),
        TimeElapsedColumn(),
    )
    with RichProgress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield _Shown(bar, total)


class _Shown(Progress):
    def __init__(self, bar: "Bar", total: int) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=total, tokens=0)
        self._tokens = 0

    def advance(self, num_tokens: int, *, has_ended: bool) -> None:
        """Redrawn a few times per second, not at every call."""
        self._tokens += num_tokens
        self._bar.update(self._task, advance=int(has_ended), tokens=self._tokens)
