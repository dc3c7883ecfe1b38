"""Processes of a pool: they end with whoever began them, and are interrupted without a word."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PROGRAM = """
import sys, threading, time
from multiprocessing import active_children
from sdcontrol.experiments.parallel import Pool


def tell():
    while len(active_children()) < 2:
        time.sleep(0.01)
    time.sleep(float(sys.argv[1]))
    print("begun", flush=True)


if __name__ == "__main__":
    threading.Thread(target=tell, daemon=True).start()
    try:
        list(Pool(2).run(time.sleep, [100.0] * 3))
    except KeyboardInterrupt:
        print("interrupted")
"""


@pytest.mark.parametrize("seconds", [0.0, 0.3, 3.0], ids=lambda s: f"after {s} s")
@pytest.mark.parametrize(
    ("number", "send"),
    [(signal.SIGINT, os.killpg), (signal.SIGINT, os.kill), (signal.SIGTERM, os.kill)],
    ids=["Ctrl-C", "SIGINT", "SIGTERM"],
)
def test_no_process_outlives_or_complains_of_a_signal(
    tmp_path: Path, number: signal.Signals, send: Callable[[int, int], None], seconds: float
) -> None:
    """A terminal's Ctrl-C reaches all, other signals the program alone; what it prints ends with its last process."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    program = subprocess.Popen(
        [sys.executable, str(script), str(seconds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert program.stdout is not None
    assert program.stdout.readline() == "begun\n"
    send(program.pid, number)
    out, err = program.communicate(timeout=60)
    assert "Traceback" not in err
    assert out == ("interrupted\n" if number == signal.SIGINT else "")
