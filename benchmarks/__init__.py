"""Speed, never correctness: `python -m benchmarks` runs all and writes `benchmarks/results/`."""
