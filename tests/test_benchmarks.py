"""The benchmark for a GPU, in tiny sizes on the CPU."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.gpu import SYSTEMS, Kept, parts, tables
from benchmarks.gpu_jobs import JOBS
from benchmarks.models import LARGE

ROOT = Path(__file__).parent.parent
ABOUT = {"device": "dry"}
#: The script compares with TorchJD where that is installed.
SYSTEMS_HERE = SYSTEMS if find_spec("torchjd") else SYSTEMS[:2]


def test_every_part_has_a_job_and_a_name_of_its_own() -> None:
    every = list(parts(list(LARGE), True, SYSTEMS, 5, False))
    assert len({part.key for part in every}) == len(every)
    assert {part.job for part in every} == set(JOBS)
    assert not [part.key for part in parts(list(LARGE), True, SYSTEMS, 5, True) if "compiled" in part.key]


def test_results_of_another_device_are_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    Kept(path, ABOUT).add("kernel", {"kernel": 1.0, "matmul": 2.0, "share": 0.5})
    assert Kept(path, ABOUT).found["kernel"]["share"] == 0.5
    assert not Kept(path, {"device": "another"}).found
    assert "0.50x" in tables(Kept(path, ABOUT).found)


def dry(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu", "--dry", "--models", "gpt2", "--output", str(path), *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def checked(done: subprocess.CompletedProcess[str], path: Path, *, eager: bool) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())["found"]
    assert set(found) == {part.key for part in parts(["gpt2"], True, SYSTEMS_HERE, 5, eager)}
    assert max(found["exactness gpt2"].values()) < 1e-12
    assert "gpt2" in done.stdout and "NO" not in done.stdout


def test_a_dry_run_is_exact(tmp_path: Path) -> None:
    checked(dry(tmp_path / "gpu.json", "--eager"), tmp_path / "gpu.json", eager=True)


@pytest.mark.slow
def test_a_dry_run_takes_up_where_it_ended(tmp_path: Path) -> None:
    """With the compiled systems."""
    path = tmp_path / "gpu.json"
    assert "left for another run" in dry(path, "--minutes", "0.5").stdout
    checked(dry(path), path, eager=False)
