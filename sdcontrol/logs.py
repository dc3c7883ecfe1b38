"""Events for whoever wants them.

They go to the application's structlog if it has configured one, otherwise to standard logging under
the module's name, which shows warnings only unless told otherwise. A library prints nothing.
"""

import logging

import structlog

__all__ = ["EventLog"]


class EventLog:
    """Logs fixed phrases in the past tense, with facts as fields."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._plain = logging.getLogger(name)

    def debug(self, event: str, **facts: object) -> None:
        """Something of a single step."""
        self._log(logging.DEBUG, event, facts)

    def info(self, event: str, **facts: object) -> None:
        """A change of state."""
        self._log(logging.INFO, event, facts)

    def warning(self, event: str, **facts: object) -> None:
        """Something went wrong and was contained."""
        self._log(logging.WARNING, event, facts)

    def _log(self, level: int, event: str, facts: dict[str, object]) -> None:
        if structlog.is_configured():  # of its loggers, some know no `log`; all know these names
            tell = getattr(structlog.get_logger(self._name), logging.getLevelName(level).lower())
            tell(event, **facts)
        elif self._plain.isEnabledFor(level):
            shown = " ".join(f"{name}={fact!r}" for name, fact in facts.items())
            self._plain.log(level, "%s %s", event, shown)
