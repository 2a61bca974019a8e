"""From the launcher's end to the verdict, with a script in place of the launcher. A real SLURM's are in tests/cluster/."""

import json
import sys
from pathlib import Path

import pytest

from clap_ds.launch import preflight
from clap_ds.launch.launchers import Launcher

RANKS = """
import json, pathlib, sys, time
from clap_ds.ranks import failure
folder, megabytes, packages = pathlib.Path(sys.argv[2]), sys.argv[3], sys.argv[4].split(",")
assert (folder / "hostfile").read_text() == "n1 slots=1\\nn2 slots=1\\n" and megabytes == "4.0" and "torch" in packages
def arrive(*hosts):
    for rank, host in enumerate(hosts):
        answer = {"host": host, "gpus": {}, "cores": "0 (0)", "faults": [], "software": {"code": "x", "torch": "2"}}
        (folder / f"rank-{rank}.json").write_text(json.dumps(answer))
def fail(rank, message):
    failure.speak_in(folder, rank, f"n{rank + 1}")
    failure.leave_word(failure.ERROR, message, 1)
def measure():
    ranks = [{"clock": 1.0, "wrong": 0, "tflops": 1.0, "links": []}] * 2
    (folder / "measured.json").write_text(json.dumps({"bus_gb_per_s": 1.0, "ranks": ranks}))
"""


@pytest.mark.parametrize(
    ("then", "problem"),
    [
        ("arrive('n1.cluster', 'n2'); measure()", ""),
        (
            "arrive('n1'); print('n2: ssh: No route to host'); time.sleep(600)",
            "n2: can't be reached, or starts no rank: ssh: No route to host",
        ),
        (
            "print('srun: error: n2: task 1: Killed'); arrive('n1')",
            "n2: can't be reached, or starts no rank: task 1: Killed",
        ),
        (
            "print('srun: error: n2: task 1: Exited\\nsrun: error: n1: task 0: Terminated')",
            "n2: can't be reached, or starts no rank: task 1: Exited",
        ),
        ("arrive('n2')", "n1: can't be reached, or starts no rank: no sign of life"),
        (
            "arrive('n1', 'n2'); fail(1, 'CUDA error: uncorrectable ECC')",
            "the ranks failed: rank 1 on n2: CUDA error: uncorrectable ECC",
        ),
        ("arrive('n1', 'n2'); sys.exit(3)", "the ranks failed: exit code 3"),
    ],
)
def test_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], then: str, problem: str
) -> None:
    monkeypatch.setattr(
        Launcher,
        "command",
        lambda self, slots, hostfile, port, words: [sys.executable, "-uc", RANKS + then, *words[1:]],
    )
    monkeypatch.setattr(preflight, "ARRIVE_S", 3.0)
    monkeypatch.setattr(preflight.signal, "signal", lambda *_: None)  # of the tests' process
    (tmp_path / "site.json").write_text(json.dumps({"run_root": str(tmp_path / "runs"), "python": sys.executable}))
    words = ["--site", str(tmp_path / "site.json"), "--launcher", "pdsh", "--nodelist", "n[1-2]", "--slots", "1"]
    assert preflight.main([*words, "--megabytes", "4"]) == bool(problem)
    shown, kept = capsys.readouterr().out.splitlines(), list((tmp_path / "runs").iterdir())
    if problem:
        assert shown[-2:] == [f"problem: {problem}", f"the ranks' output is in {kept[0]}"]
    else:
        assert (shown[-1], kept) == ("nothing found that would break a run", [])


@pytest.mark.parametrize("megabytes", ["-3", "nan"])
def test_nothing_to_reduce_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], megabytes: str
) -> None:
    monkeypatch.setattr(preflight.signal, "signal", lambda *_: None)
    assert preflight.main(["--megabytes", megabytes]) == 2
    assert f"--megabytes {megabytes}: expected more than 0" in capsys.readouterr().err
