"""The benchmark for a GPU, in tiny sizes on the CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import SYSTEMS, Kept, parts, tables
from benchmarks.gpu_jobs import JOBS
from benchmarks.models import LARGE

ROOT = Path(__file__).parent.parent
ABOUT = {"device": "dry"}


def test_every_part_has_a_job_and_a_name_of_its_own() -> None:
    every = list(parts(list(LARGE), True, SYSTEMS, 5, False))
    assert len({part.key for part in every}) == len(every)
    assert {part.job for part in every} == set(JOBS)
    assert not [part.key for part in parts(list(LARGE), True, SYSTEMS, 5, True) if "compiled" in part.key]


@pytest.mark.parametrize("key", ("exactness gpt2", "speed gpt2 gramfx", "kernel"))
def test_parts_run_and_make_a_table(key: str) -> None:
    (part,) = [part for part in parts(["gpt2"], True, SYSTEMS, 5, True) if part.key == key]
    result = JOBS[part.job](**part.given)
    if key.startswith("exactness"):
        assert max(result["gramian"], result["gradient"]) < 1e-12
    text = tables({key: result})
    assert ("gpt2" in text) == (result is not None and key != "kernel")
    assert "NO" not in text


def test_results_of_another_device_are_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    Kept(path, ABOUT).add("kernel", {"kernel": 1.0, "matmul": 2.0, "share": 0.5})
    assert Kept(path, ABOUT).found["kernel"]["share"] == 0.5
    assert not Kept(path, {"device": "another"}).found
    assert "0.50x" in tables(Kept(path, ABOUT).found)


@pytest.mark.slow
def test_a_dry_run_is_exact_and_takes_up_where_it_ended(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--dry", "--models", "gpt2", "--output", str(path)]
    short = subprocess.run([*command, "--minutes", "0.5"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "left for another run" in short.stdout
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())["found"]
    assert set(found) == {part.key for part in parts(["gpt2"], True, SYSTEMS, 5, False)}
    assert "NO" not in done.stdout
