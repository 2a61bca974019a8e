"""Evaluation of ranks' reports. tests/cluster/ runs preflight on a real SLURM."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from clap_ds.distributed.error_file import RankError
from clap_ds.launch.preflight import check_tasks, evaluate, hosts_of, lines, odd_hosts, slow_links
from clap_ds.utils.errors import UserError

SILENT = "unreachable, or starts no rank:"
REFUSED = "Unable to create step for job 79: More processors requested than permitted"


@pytest.mark.parametrize(
    ("answers", "output", "wrong", "problem"),
    [
        (["n1", "n2"], "", 0, ""),
        (["n1"], "n2: ssh: No route to host", None, f"n2: {SILENT} ssh: No route to host"),
        (
            [],
            "srun: error: n2: Exited\nsrun: error: n1: task 0: Terminated",
            None,
            f"n2: {SILENT} Exited",
        ),
        ([], f"srun: error: {REFUSED}\n", None, f"the launcher failed: {REFUSED}"),
        ([], "cmd = srun --nodelist=n1,n2\nno launcher", None, "the launcher failed: no launcher"),
        ([], "", None, "the launcher failed: no response, exit code 1"),
        (
            [],
            "slurmstepd-n2: error: execve(): python: No such file",
            None,
            f"n2: {SILENT} execve(): python: No such file",
        ),
        (["n1", "n2"], "", 5, "n2: rank 1 has 5 wrong elements after an all-reduce"),
        (["n1", "n2"], "", None, "the ranks failed: rank 1 on n2: CUDA error: ECC"),
    ],
)
def test_verdict(
    tmp_path: Path, answers: list[str], output: str, wrong: int | None, problem: str
) -> None:
    (tmp_path / "output").write_text(output)
    for rank, host in enumerate(answers):
        answer = {"host": host, "gpus": {}, "faults": [], "software": {"code": "x", "torch": "2"}}
        (tmp_path / f"rank-{rank}.json").write_text(json.dumps(answer))
    if wrong is not None:
        ranks = [{"wrong": wrong * rank, "links": []} for rank in range(2)]
        (tmp_path / "measured.json").write_text(json.dumps({"bus_gb_per_s": 1.5, "ranks": ranks}))
    (tmp_path / "errors").mkdir()
    error = RankError(0, 1, "n2", "error", "CUDA error: ECC", 1, "", [], [])
    (tmp_path / "errors" / "rank1.json").write_text(json.dumps(asdict(error)))
    problems, shown = evaluate({"n1": 1, "n2": 1}, 1, tmp_path)
    assert problems == [f"problem: {problem}"] * bool(problem)
    assert ("all-reduce: 1.50 GB/s" in shown) == (wrong is not None)


def _odd(**changes: dict[str, str | None]) -> list[str]:
    """Return findings about three hosts with two ranks, each with one GPU; `changes` by host."""
    answers: list[dict[str, Any]] = []
    for rank in range(6):
        host = f"n{rank // 2 + 1}"
        has = {
            "gpu": "H100",
            "commit": "dd3a5b2a",
            "code": "abc",
            "torch": "2.13.0",
            **changes.get(host, {}),
        }
        answers.append(
            {"host": host, "gpus": {f"GPU-{rank}": has.pop("gpu")}}
            | ({} if rank % 2 else {"software": has})
        )
    return lines("problem", odd_hosts(hosts_of(answers)))


def test_the_host_that_differs_is_named() -> None:
    assert _odd() == _odd(n2={"commit": None}) == []
    assert _odd(n2={"code": "x"}) == ["problem: n2: code: x, elsewhere abc"]
    assert _odd(n2={"gpu": "A100"}) == ["problem: n2: GPUs: 2 × A100, elsewhere 2 × H100"]


def test_slow_links_are_named() -> None:
    ranks: list[dict[str, Any]] = [{"links": []} for rank in range(8)]
    for lead, rate in zip((0, 2, 4, 6), (20.0, 2.0, 21.0, 19.0), strict=True):
        ranks[lead]["links"] = [[lead, (lead + 2) % 8, rate]]
    slow = slow_links(ranks, ["n1", "n1", "n2", "n2", "n3", "n3", "n4", "n4"])
    assert [where for where, _ in slow] == ["n2–n3"]


def test_allocation_with_too_few_tasks_is_refused_before_srun_does() -> None:
    small = {"SLURM_NTASKS_PER_NODE": "1", "SLURM_JOB_CPUS_PER_NODE": "1(x2)"}
    with pytest.raises(UserError, match="--ntasks-per-node=2"):
        check_tasks(small, 2)
    check_tasks(
        {**small, "SLURM_JOB_CPUS_PER_NODE": "8(x2)"}, 2
    )  # srun can start more tasks on whole nodes
    check_tasks({}, 2)
