"""Evaluation of ranks' reports. tests/cluster/ runs preflight on a real SLURM."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from clap_ds.distributed.error_file import RankError
from clap_ds.launch.preflight import evaluate

REFUSED = "Unable to create step for job 79: More processors requested than permitted"


def _evaluate(
    folder: Path,
    hosts: list[str],
    output: str = "",
    num_wrong: list[int] | None = None,
    **odd_software: str | None,
) -> tuple[str, str]:
    """Return problems and other lines of an allocation of n1, n2 and n3 with a rank each.

    Args:
        hosts: those that report.
        num_wrong: wrong elements of the sum by rank, if the ranks could measure.
        odd_software: of n2.
    """
    (folder / "output").write_text(output)
    for rank, host in enumerate(hosts):
        software = {"commit": "dd3a5b2a", "code": "abc", "torch": "2.13.0"}
        if host == "n2":
            software |= odd_software
        gpus = {f"GPU-{rank}": "H100"}
        report = {"host": host, "gpus": gpus, "faults": [], "software": software}
        (folder / f"rank-{rank:05}.json").write_text(json.dumps(report))
    if num_wrong is not None:
        measured = {"bus_gb_per_s": 1.5, "seconds": 0.25, "num_wrong": num_wrong}
        (folder / "measured.json").write_text(json.dumps(measured))
    problems, lines = evaluate({"n1": 1, "n2": 1, "n3": 1}, 1, folder)
    return "\n".join(problems), "\n".join(lines)


def test_hosts_without_problems_are_described(tmp_path: Path) -> None:
    problems, lines = _evaluate(tmp_path, ["n1", "n2", "n3"], num_wrong=[0, 0, 0], commit=None)
    assert problems == ""
    assert "n1  GPUs 1 × H100, torch 2.13.0, code dd3a5b2a" in lines
    assert "all-reduce: 1.50 GB/s, 0.250 s" in lines


def test_host_that_differs_or_has_wrong_sums_is_named(tmp_path: Path) -> None:
    problems, _ = _evaluate(tmp_path, ["n1", "n2", "n3"], num_wrong=[0, 0, 5], code="x")
    assert problems.splitlines() == [
        "problem: n2: code: x, elsewhere abc",
        "problem: n3: rank 2 has 5 wrong elements after an all-reduce",
    ]


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
    problems, _ = _evaluate(tmp_path, hosts, output)
    assert problem in problems
    assert ("unreachable" in problems) == bool(hosts)


def test_error_of_a_rank_is_named(tmp_path: Path) -> None:
    (tmp_path / "errors").mkdir()
    error = RankError(0, 1, "n2", "error", "CUDA error: ECC")
    (tmp_path / "errors" / "rank1.json").write_text(json.dumps(asdict(error)))
    problems, _ = _evaluate(tmp_path, ["n1", "n2", "n3"])
    assert problems == "problem: the ranks failed: rank 1 on n2: CUDA error: ECC"
