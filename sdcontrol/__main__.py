"""The command `sdcontrol`, installed or as `python -m sdcontrol`, from its first moment on.

Knows what an interrupt means while the commands are loaded, and what to do with output that nobody takes;
everything else stands in `sdcontrol.cli`.
"""

import os
import sys

__all__ = ["main"]


def main() -> int:
    """Load the commands and run the one asked for; returns the exit code, 130 where interrupted."""
    try:
        from sdcontrol.cli import main as run

        return run()
    except KeyboardInterrupt:
        print("sdcontrol: interrupted", file=sys.stderr)
        return 130
    finally:
        _drop_unwritten()


def _drop_unwritten() -> None:
    """What standard output or error does not take: or Python would try again, complain, and end with 120."""
    for stream in filter(None, (sys.stdout, sys.stderr)):  # none: closed from the beginning
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    sys.exit(main())
