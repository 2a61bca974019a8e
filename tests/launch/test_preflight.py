"""Evaluation of ranks' reports. tests/cluster/ runs preflight on a real SLURM."""

import json
from pathlib import Path

import pytest

from clap_ds.launch.preflight import evaluate

SLOTS = {"n1": 1, "n2": 1, "n3": 1}
REFUSED = "Unable to create step for job 79: More processors requested than permitted"


def _write_reports(folder: Path, hosts: list[str], **odd_software: str) -> None:
    """Write the report of a rank on each of these hosts. `odd_software`: that of n2."""
    for rank, host in enumerate(hosts):
        software = {"commit": "dd3a5b2a", "code": "abc", "torch": "2.13.0"}
        if host == "n2":
            software |= odd_software
        report = {"host": host, "gpus": {f"GPU-{rank}": "H100"}, "faults": [], "software": software}
        (folder / f"rank-{rank:05}.json").write_text(json.dumps(report))


def test_hosts_are_described_and_those_that_differ_or_have_wrong_sums_named(tmp_path: Path) -> None:
    _write_reports(tmp_path, ["n1", "n2", "n3"], code="x")
    measured = {"bus_gb_per_s": 1.5, "seconds": 0.25, "num_wrong": [0, 0, 5]}
    (tmp_path / "measured.json").write_text(json.dumps(measured))
    problems, lines = evaluate(SLOTS, 1, tmp_path)
    assert problems == [
        "problem: n2: code: x, elsewhere abc",
        "problem: n3: rank 2 has 5 wrong elements after an all-reduce",
    ]
    assert "n1  GPUs 1 × H100, torch 2.13.0, code dd3a5b2a" in "\n".join(lines)
    assert "all-reduce: 1.50 GB/s, 0.250 s" in lines


@pytest.mark.parametrize(
    ("hosts", "output", "problem"),
    [
        (["n1", "n3"], "", "n2: unreachable"),
        ([], "srun: error: n2: task 1: Exited with exit code 2\n", "n2: task 1: Exited"),
        ([], f"srun: error: {REFUSED}\n", REFUSED),
    ],
)
def test_host_that_starts_no_rank_is_named_unless_slurm_refuses_all(
    tmp_path: Path, hosts: list[str], output: str, problem: str
) -> None:
    _write_reports(tmp_path, hosts)
    (tmp_path / "output").write_text(output)
    problems, _ = evaluate(SLOTS, 1, tmp_path)
    assert problem in "\n".join(problems)
    assert ("unreachable" in str(problems)) == bool(hosts)
