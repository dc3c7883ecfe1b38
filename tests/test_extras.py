"""What not everybody installs: whoever lacks it is told which extra brings it, in one line."""

import subprocess
import sys

import pytest

from sdcontrol.errors import ConfigError
from sdcontrol.extras import check_installed, missing, needed

HIDDEN = """
import sys
from importlib.machinery import PathFinder

finds = PathFinder.find_spec

def find_spec(name, path=None, target=None):
    hidden = "pyarrow", "sklearn", "skops", "prometheus_client", "ray"
    return None if name.partition(".")[0] in hidden else finds(name, path, target)

PathFinder.find_spec = staticmethod(find_spec)
"""
COMMAND = "from sdcontrol.cli import main\nsys.exit(main(sys.argv[1:]))\n"


def without_extras(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", HIDDEN + program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "package", "extra"),
    [
        (["inspect", "bundled:mixed"], "pyarrow", "traces"),
        (["replay", "bundled:mixed"], "pyarrow", "traces"),
        (["record", "a prompt", "--output", "never-written"], "pyarrow", "traces"),
        (["train", "bundled:mixed", "--output", "never-written.skops"], "sklearn", "learned"),
    ],
)
def test_a_command_names_the_extra_that_it_needs(
    arguments: list[str], package: str, extra: str
) -> None:
    found = without_extras(COMMAND, *arguments)
    assert found.stderr.splitlines()[-1] == (
        f"sdcontrol: error: this needs {package}: pip install 'sdcontrol[{extra}]'"
    )
    assert found.returncode == 2


@pytest.mark.parametrize(
    ("program", "extra"),
    [
        ("from sdcontrol.integrations import prometheus", "metrics"),
        ("from sdcontrol.traces.reader import Trace", "traces"),
        ("from sdcontrol.traces.recorder import Recorder", "traces"),
        ("from sdcontrol.traces.what_if import simulate", "traces"),
        ("from sdcontrol.skops_files import read_skops; read_skops('model.skops')", "learned"),
        (
            "from sdcontrol.integrations.recording import recorder_of; recorder_of(None, 'trace')",
            "traces",
        ),
    ],
)
def test_so_does_the_library(program: str, extra: str) -> None:
    found = without_extras(program)
    assert found.stderr.splitlines()[-1].startswith("sdcontrol.errors.ConfigError: this needs ")
    assert found.stderr.rstrip().endswith(f"pip install 'sdcontrol[{extra}]'")


def test_what_no_extra_brings_is_no_business_of_theirs() -> None:
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"), needed():
        import not_there_at_all  # type: ignore[import-not-found]  # noqa: F401
    assert missing(ValueError("pyarrow")) is None
    error = missing(ModuleNotFoundError("no", name="pyarrow.parquet"))
    assert isinstance(error, ConfigError)
    assert "sdcontrol[traces]" in str(error)
    check_installed("pyarrow")
