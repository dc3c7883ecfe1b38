"""The command `sdcontrol`, installed or as `python -m sdcontrol`, from its first moment on.

Knows what an interrupt means while the commands are loaded; everything else stands in `sdcontrol.cli`.
"""

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


if __name__ == "__main__":
    sys.exit(main())
