"""From the launcher's end to the verdict, with a script in place of the launcher, and what is made of ranks' answers. A real
SLURM's are in tests/cluster/."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from clap_ds.launch import preflight
from clap_ds.launch.launchers import Launcher
from clap_ds.launch.preflight import hosts_of, lines, odd_hosts, slow_ones

RANKS = """
import json, pathlib, sys, time
from clap_ds.ranks import failure
folder, megabytes, packages = pathlib.Path(sys.argv[2]), sys.argv[3], sys.argv[4].split(",")
assert (folder / "hostfile").read_text() == "n1 slots=1\\nn2 slots=1\\n" and megabytes == "4.0" and "torch" in packages
def arrive(*hosts, **more):
    for rank, host in enumerate(hosts):
        answer = {"host": host, "gpus": {}, "faults": [], "software": {"code": "x", "torch": "2"}, **more}
        (folder / f"rank-{rank}.json").write_text(json.dumps(answer))
def fail(rank, message):
    failure.speak_in(folder, rank, f"n{rank + 1}")
    failure.leave_word(failure.ERROR, message, 1)
def measure(wrong=0):
    ranks = [{"wrong": wrong * rank, "tflops": 1.0, "links": []} for rank in range(2)]
    (folder / "measured.json").write_text(json.dumps({"bus_gb_per_s": 1.5, "ranks": ranks}))
"""
SILENT = "can't be reached, or starts no rank:"


@pytest.mark.parametrize(
    ("then", "problem"),
    [
        ("arrive('n1.cluster', 'n2'); measure()", ""),
        ("arrive('n1'); print('n2: ssh: No route to host'); time.sleep(600)", f"n2: {SILENT} ssh: No route to host"),
        ("print('srun: error: n2: Exited\\nsrun: error: n1: task 0: Terminated')", f"n2: {SILENT} Exited"),
        ("arrive('n1', 'n2', faults=['1 GB free for /tmp'])", "n1, n2: 1 GB free for /tmp"),
        ("arrive('n1', 'n2'); measure(wrong=5)", "n2: rank 1 has 5 wrong elements after an all-reduce"),
        ("arrive('n1', 'n2'); fail(1, 'CUDA error: ECC')", "the ranks failed: rank 1 on n2: CUDA error: ECC"),
        ("arrive('n1', 'n2'); sys.exit(3)", "the ranks failed: exit code 3"),
    ],
)
def test_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], then: str, problem: str
) -> None:
    command = lambda self, slots, hostfile, port, words: [sys.executable, "-uc", RANKS + then, *words[1:]]  # noqa: E731
    monkeypatch.setattr(Launcher, "command", command)
    monkeypatch.setattr(Launcher, "check", lambda self, slots: None)
    monkeypatch.setattr(preflight, "ARRIVE_S", 3.0)
    monkeypatch.setattr(preflight.signal, "signal", lambda *_: None)  # of the tests' process
    (tmp_path / "site.json").write_text(json.dumps({"run_root": str(tmp_path / "runs"), "python": sys.executable}))
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    words = ["--site", str(tmp_path / "site.json"), "--launcher", "torchrun", "--slots", "1"]
    assert preflight.main([*words, "--megabytes", "4"]) == bool(problem)
    shown, kept = capsys.readouterr().out.splitlines(), list((tmp_path / "runs").iterdir())
    assert [line for line in shown if "problem: " in line] == [f"problem: {problem}"] * bool(problem)
    assert len(kept) == bool(problem), "the ranks' output is kept where it may tell more"


def _odd(**changes: dict[str, str | None]) -> list[str]:
    """What is odd about three hosts of two ranks, which see a GPU each; `changes` by host."""
    answers: list[dict[str, Any]] = []
    for rank in range(6):
        has = {"gpu": "H100", "code": "abc", "torch": "2.13.0"} | changes.get(host := f"n{rank // 2 + 1}", {})
        answers.append(
            {"host": host, "gpus": {f"GPU-{rank}": has.pop("gpu")}} | ({} if rank % 2 else {"software": has})
        )
    return lines("problem", odd_hosts(hosts_of(answers)))


def test_the_host_that_differs_is_named() -> None:
    assert _odd() == []
    assert _odd(n2={"code": "x"}) == ["problem: n2: code: x, elsewhere abc"]
    assert _odd(n2={"gpu": "A100"}) == ["problem: n2: GPUs: 2 × A100, elsewhere 2 × H100"]
    everywhere = {f"n{host}": {"torch": None} for host in (1, 2, 3)}
    assert _odd(**everywhere) == ["problem: n1, n2, n3: torch isn't installed"]


def test_slow_links_and_hosts_are_named() -> None:
    rates = [20.0, 2.0, 21.0, 19.0]
    ranks: list[dict[str, Any]] = [{"tflops": 700.0 - 300 * (rank == 7), "links": []} for rank in range(8)]
    for lead, rate in zip((0, 2, 4, 6), rates, strict=True):
        ranks[lead]["links"] = [[lead, (lead + 2) % 8, rate]]
    assert list(slow_ones({"ranks": ranks}, ["n1", "n1", "n2", "n2", "n3", "n3", "n4", "n4"])) == [
        ("n2–n3", "slow link, GB/s: 2.00, median 19.50"),
        ("n4", "slow compute, TFLOPS: 400.00, median 700.00"),
    ]
