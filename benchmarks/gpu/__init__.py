"""The engine on a GPU, part by part: `python -m benchmarks.gpu`."""

import time

STARTED = time.perf_counter()
"""When the process began, about: before whatever takes long to import, or is compiled by that."""
