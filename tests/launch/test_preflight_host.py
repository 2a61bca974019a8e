"""This machine as a host, with GPUs that an nvidia-smi of the test's shows."""

import importlib.metadata
import os
import pwd
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clap_ds.launch import preflight_host
from clap_ds.launch.preflight_host import PACKAGES, code_digest, gpus, uses_by_others, versions
from tests.launch.conftest import wait_for

JOB = "4711"
GPUS = [f"{number}, GPU-{number}aa, 3 MiB, NVIDIA H100 80GB HBM3, 81559 MiB, 580.65.06" for number in range(4)]
USER = pwd.getpwuid(os.getuid()).pw_name


class NvidiaSmi:
    """Shows GPUs and the processes that compute on them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        script = "case $1 in --query-gpu=*) cat gpus ;; --query-compute-apps=*) cat processes ;; *) exit 1 ;; esac"
        (folder / "nvidia-smi").write_text(f'#!/bin/sh\ncd "{folder}"\necho "$1" >> calls\n{script}\n')
        (folder / "nvidia-smi").chmod(0o755)
        self.shows(GPUS)

    def shows(self, gpus: list[str], *processes: str) -> None:
        (self._folder / "gpus").write_text("\n".join(gpus))
        (self._folder / "processes").write_text("\n".join(processes))

    def num_calls(self) -> int:
        return len((self._folder / "calls").read_text().splitlines())


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NvidiaSmi:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    return NvidiaSmi(tmp_path / "bin")


@pytest.fixture
def of_job() -> Iterator[int]:
    """A process of the job's."""
    with subprocess.Popen(["sleep", "60"], env={**os.environ, "SLURM_JOB_ID": JOB}) as process:
        wait_for(lambda: Path(f"/proc/{process.pid}/environ").read_bytes())  # not there yet, for a moment
        yield process.pid
        process.kill()


@pytest.mark.parametrize(
    ("visible", "indices"),
    [("0,1,2,3", "0123"), ("2,3", "23"), ("GPU-1aa,GPU-3", "13"), ("", "0123"), ("7", "")],
)
def test_only_the_gpus_of_the_ranks_count(
    nvidia_smi: NvidiaSmi, monkeypatch: pytest.MonkeyPatch, visible: str, indices: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert "".join(gpu.index for gpu in gpus()) == indices
    assert {gpu.shown for gpu in gpus()} <= {"NVIDIA H100 80GB HBM3, 81559 MiB, 580.65.06"}


def test_processes_of_others_are_named(nvidia_smi: NvidiaSmi, of_job: int) -> None:
    nvidia_smi.shows(
        GPUS,
        f"GPU-1aa, {os.getpid()}, 40000 MiB, /opt/envs/their own/python",
        f"GPU-2aa, {os.getpid()}, [N/A], [Not Found]",
        "GPU-3aa, 99999999, 512 MiB, [Not Found]",  # gone, or in another namespace
        f"GPU-0aa, {of_job}, 40000 MiB, python",
        "GPU-0aa, 99999998, 30 MiB, nvidia-cuda-mps-server",
        "GPU-9aa, 99999997, 30 MiB, python",  # not a GPU of this job
    )
    name = Path("/proc/self/comm").read_text().strip()
    assert uses_by_others(gpus(), JOB)[0] == [
        f"GPU 1 is in use by process {os.getpid()} (python of {USER}), 40000 MiB",
        f"GPU 2 is in use by process {os.getpid()} ({name} of {USER}), [N/A]",
        "GPU 3 is in use by process 99999999, 512 MiB",
    ]
    for job in ("4712", ""):  # outside SLURM every process is another's
        assert f"process {of_job} " in uses_by_others(gpus(), job)[0][-1]


def test_memory_that_no_process_shows_for(nvidia_smi: NvidiaSmi, of_job: int) -> None:
    busy = [GPUS[0].replace("3 MiB", "70000 MiB", 1), GPUS[1].replace("3 MiB", "70000 MiB", 1), GPUS[2], GPUS[3]]
    nvidia_smi.shows(busy, f"GPU-0aa, {of_job}, 69000 MiB, python")
    assert uses_by_others(gpus(), JOB) == ([], ["GPU 1 has 70000 MiB in use, by no process that shows"])


def test_nvidia_smi_is_called_twice_at_most(
    nvidia_smi: NvidiaSmi, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    preflight_host.main(str(tmp_path / "to" / "be" / "made"), JOB)
    assert capsys.readouterr().out.startswith("clap-preflight {")
    assert nvidia_smi.num_calls() <= 2 + (not Path("/proc/driver/nvidia/version").exists())  # which tells the driver


def test_versions_are_those_that_python_would_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert versions() == {name: importlib.metadata.version(name) for name in PACKAGES}
    (tmp_path / "WebDataset-9.9.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert versions()["webdataset"] == "9.9"
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert versions() == {**dict.fromkeys(PACKAGES), "webdataset": "9.9"}


def test_digest_knows_contents_and_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight_host, "PACKAGE", tmp_path)
    (tmp_path / "__pycache__").mkdir()
    found = set()
    for name, text in (("a.py", "1"), ("a.py", "2"), ("b.json", "2"), ("notes.txt", "x"), ("__pycache__/c.py", "x")):
        (tmp_path / name).write_text(text)
        found.add(code_digest())
    assert len(found) == 3
