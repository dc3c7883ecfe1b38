"""Replays on a local Ray find what one process finds."""

import json
import os
from pathlib import Path

import pytest

from sdcontrol.cli import main
from sdcontrol.errors import CounterfactualError
from sdcontrol.experiments.parallel import Pool
from sdcontrol.experiments.replay_runs import ReplayJob, run_job
from sdcontrol.experiments.sources import Source
from sdcontrol.traces.bundled import bundled_trace

ray = pytest.importorskip("ray", reason="Ray is not installed; pip install 'sdcontrol[ray]'")
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own


def test_a_replay_on_ray_finds_what_one_process_finds(tmp_path: Path) -> None:
    records = {}
    for name, where in {"here": ["--workers", "1"], "ray": ["--workers", "2", "--ray"]}.items():
        path = tmp_path / f"{name}.json"
        policies = ["--policy", "off", "--policy", "static:ngram:2"]
        arguments = ["replay", "bundled:mixed", *policies, *where, "--json", str(path)]
        assert main(arguments) == 0
        records[name] = json.loads(path.read_text("utf-8"))
    assert records["here"] == records["ray"]
    assert not ray.is_initialized()


def test_an_error_on_ray_is_the_run_s_own() -> None:
    job = ReplayJob(Source(bundled_trace("off"), "trace"), "off")
    with pytest.raises(CounterfactualError, match=r"no acceptance\.parquet"):
        list(Pool(os.cpu_count() or 1, "local").run(run_job, [job]))
    assert not ray.is_initialized()
