"""What the tests of commands on traces share: the program as a function."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from sdcontrol.cli import main

HERE = ["--workers", "1"]
"""No other process."""

Command = Callable[..., tuple[int, str, str]]
"""Arguments in; exit code, output, errors out."""


def command_of(capsys: pytest.CaptureFixture[str]) -> Command:
    """The program `sdcontrol`."""

    def run(*arguments: object) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def read(path: Path) -> dict:
    return json.loads(path.read_text("utf-8"))


def is_one_line(err: str) -> bool:
    return err.startswith("sdcontrol: error: ") and err.count("\n") == 1 and "Traceback" not in err
