"""What all commands share: parsing, logging, and what an error means to a shell.

Knows no command.
"""

import argparse
import errno
import io
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn, TypeAlias

from sdcontrol import __version__
from sdcontrol.errors import (
    ConfigError,
    CounterfactualError,
    SdcontrolError,
    TraceError,
    UnsupportedGeneration,
    UnsupportedModel,
)

__all__ = [
    "Commands",
    "Parser",
    "add_command",
    "escape_what_encodings_lack",
    "exit_code",
    "logging_to_stderr",
    "message_of",
    "new_parser",
    "open_missing_streams",
]

_BAD_REQUESTS = (
    ConfigError,
    UnsupportedModel,
    UnsupportedGeneration,
    TraceError,
    CounterfactualError,
)
_BAD_PATHS = {
    errno.EACCES,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
}


class Parser(argparse.ArgumentParser):
    """Raises instead of printing its usage and leaving."""

    def error(self, message: str) -> NoReturn:
        """Raise `ConfigError`."""
        raise ConfigError(f"{message}; see {self.prog} --help")


Commands: TypeAlias = "argparse._SubParsersAction[Parser]"
"""Where a command adds its parser."""


def new_parser() -> tuple[Parser, Commands]:
    """The parser of the program, and the place for its commands."""
    parser = Parser(
        prog="sdcontrol",
        description="Adaptive speculation control for LLM decoding.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"sdcontrol {__version__}")
    return parser, parser.add_subparsers(metavar="COMMAND", required=True)


def add_command(
    commands: Commands, name: str, run: Callable[[argparse.Namespace], int], description: str
) -> Parser:
    """A parser for the command `name`, which `run` executes; it returns the exit code."""
    parser = commands.add_parser(
        name, help=description, description=description, allow_abbrev=False
    )
    parser.set_defaults(run=run)
    parser.add_argument("--json", metavar="PATH", help="write the result as JSON, for machines")
    parser.add_argument("--debug", action="store_true", help="show logs, and tracebacks of errors")
    return parser


def exit_code(error: Exception) -> int:
    """2 for what was asked wrongly, 1 for what went wrong."""
    is_bad = isinstance(error, _BAD_REQUESTS) or _is_of_a_path(error)
    return 2 if is_bad else 1


def _is_of_a_path(error: Exception) -> bool:
    """Whether it is that a path cannot be used at all, rather than that a disk is full."""
    if not isinstance(error, OSError) or error.filename is None:
        return False
    return error.errno in _BAD_PATHS


def message_of(error: Exception) -> str:
    """One line. An error that nobody foresaw says its type, and how to see more."""
    lines = str(error).strip().splitlines() or ["no message"]
    if isinstance(error, SdcontrolError):
        return " ".join(line.strip() for line in lines)
    if isinstance(error, OSError):
        is_named = error.filename is not None
        return f"{error.filename} cannot be used: {error.strerror}" if is_named else lines[0]
    return f"{type(error).__name__}: {lines[0]} (--debug shows where)"


def open_missing_streams() -> None:
    """Where standard output or error was closed before the program began, what is printed is dropped."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            nowhere = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (until the end)
            setattr(sys, name, nowhere)


def escape_what_encodings_lack() -> None:
    """Write characters that the output's encoding lacks as escapes, rather than fail after the work is done."""
    for stream in (sys.stdout, sys.stderr):
        if not isinstance(stream, io.TextIOWrapper):
            continue
        is_text = stream.encoding.lower().startswith("utf")
        if stream.errors == "strict" or (stream.errors == "surrogateescape" and not is_text):
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def logging_to_stderr(is_debugging: bool) -> Iterator[None]:
    """Log warnings, or everything, to standard error meanwhile; output has standard output."""
    import structlog

    was_configured, before = structlog.is_configured(), structlog.get_config()
    level = logging.DEBUG if is_debugging else logging.WARNING
    structlog.configure(
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        wrapper_class=structlog.make_filtering_bound_logger(level),
    )
    try:
        yield
    finally:
        structlog.reset_defaults()
        if was_configured:
            structlog.configure(**before)
