"""This machine as a host, with a fake nvidia-smi."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from clap_ds.benchmark import preflight_rank
from clap_ds.benchmark.preflight_rank import code_digest, faults, gpus

GPUS = [f"{number}, GPU-{number}aa, NVIDIA H100 80GB HBM3, 81559 MiB, 580.65.06" for number in range(4)]


@pytest.fixture
def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """File of the compute processes that it lists."""
    (tmp_path / "gpus").write_text("\n".join(GPUS))
    script = f'#!/bin/sh\ncd "{tmp_path}"\ncase $1 in --query-gpu=*) cat gpus ;; *) cat processes ;; esac\n'
    (tmp_path / "nvidia-smi").write_text(script)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    (tmp_path / "processes").touch()
    return tmp_path / "processes"


@pytest.mark.parametrize(
    ("visible", "indices"),
    [("0,1,2,3", "0123"), ("2,3", "23"), ("GPU-1aa,GPU-3aa", "13"), ("MIG-5cc", "0123"), ("", "0123"), ("7", "")],
)
def test_only_the_gpus_of_the_rank_count(
    processes: Path, monkeypatch: pytest.MonkeyPatch, visible: str, indices: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus() == {f"GPU-{index}aa": "NVIDIA H100 80GB HBM3, 81559 MiB, 580.65.06" for index in indices}


def test_processes_of_others_are_named(processes: Path, tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()", tmp_path], stdin=subprocess.PIPE) as rank:
        lines = [f"{os.getpid()}, 40000 MiB, python", f"{rank.pid}, 500 MiB, python", "99999999, [N/A], [Not Found]"]
        processes.write_text("".join(f"GPU-1aa, {line}\nGPU-9aa, 99999997, 1 MiB, of another job\n" for line in lines))
        found = [text for text in faults({"GPU-1aa": "H100"}, tmp_path / "preflight") if "in use" in text]
        assert found[1:] == [f"a GPU is in use by process {rank.pid} (python), 500 MiB",
                             "a GPU is in use by process 99999999 ([Not Found]), [N/A]"]  # fmt: skip
        ours = [text for text in faults({"GPU-1aa": "H100"}, tmp_path) if f"process {rank.pid} " in text]
        assert ours == []
        rank.communicate(b"\n")


def test_faults_of_a_host(processes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight_rank.shutil, "disk_usage", lambda _: SimpleNamespace(free=4.2e9))
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "1")
    run_root, tmp, unseen = faults({}, tmp_path / "x")
    assert f"4 GB free in {tmp_path}, expected 5" in run_root
    assert "GB free in /tmp, expected" in tmp
    assert unseen == "no GPU is visible despite SLURM_GPUS_ON_NODE=1"
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert len([*faults({}, tmp_path / "x")]) == 2


def test_digest_knows_contents_and_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight_rank, "PACKAGE", tmp_path)
    found = set()
    for name, text in (("a.py", "1"), ("a.py", "2"), ("b.json", "2"), ("notes.txt", "x")):
        (tmp_path / name).write_text(text)
        found.add(code_digest())
    assert len(found) == 3
