"""`python -m sdcontrol` is the command `sdcontrol`."""

import sys

from sdcontrol.cli import main

if __name__ == "__main__":
    sys.exit(main())
