"""Run every benchmark: `python -m benchmarks`."""

import argparse
import subprocess
import sys

COMMANDS = (
    ("benchmarks.engine", "--dtype", "float32"),
    ("benchmarks.engine", "--dtype", "bfloat16"),
    ("benchmarks.ngram", "--json", "benchmarks/results/ngram.json"),
    ("benchmarks.divergence",),
    ("benchmarks.policies",),
    ("benchmarks.acceptance", "--json"),
    ("benchmarks.simulated_regret",),
    ("benchmarks.simulated_promise",),
    ("benchmarks.closed_batches", "--live"),
    ("benchmarks.late_draft_model",),
    ("benchmarks.regret",),
    ("benchmarks.replay", "--json"),
    ("benchmarks.fidelity", "--json"),
    ("benchmarks.self_replay", "--json"),
    ("benchmarks.recording", "--json"),
    ("benchmarks.learned", "--json"),
    ("benchmarks.learned_live",),
    ("benchmarks.ab",),
    ("benchmarks.gpu",),
    ("benchmarks.figures",),  # into the documents
)


def main() -> int:
    """Run them one after the other; 1 if any failed."""
    argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__).parse_args()
    failed = 0
    for module, *arguments in COMMANDS:
        print(f"==> python -m {module} {' '.join(arguments)}", flush=True)
        failed |= subprocess.run([sys.executable, "-m", module, *arguments], check=False).returncode
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
