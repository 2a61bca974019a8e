"""Asking hosts that a fake ssh reaches, and what becomes of the ranks' folder. A real SLURM's are in tests/cluster/."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from clap_ds.launch import preflight
from clap_ds.launch.preflight import ask_hosts, run_ranks
from clap_ds.launch.preflight_report import Report
from clap_ds.launch.sites import Site

SSH = """#!/bin/bash
while [[ $1 == -* ]]; do shift; done
echo "$*" >> '{folder}/ssh_calls'
[ "$1" = n3 ] && echo 'ssh: connect to host n3 port 22: No route to host' && exit 255
shift
exec bash -c "$*"
"""
JOB = """
import json, pathlib, sys
from clap_ds.launch.job import parse_arguments
arguments = parse_arguments(sys.argv[1:])
assert (arguments.site, arguments.launcher, arguments.requeues, arguments.spare_nodes) == ("mine", "srun", 0, 0)
assert arguments.hostfile.read_text() == "n1 slots=2\\nn2 slots=2\\n"
script, output, megabytes = arguments.command
assert pathlib.Path(script).is_file() and float(megabytes) == 4.0
print("said by the ranks")
"""
MEASURED = {"wrong_elements": [0] * 4, "bus_gb_per_s": 1.0, "links_gb_per_s": [[0, 1, 1.0]], "tflops": [1.0] * 4}


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(python=sys.executable, run_root=str(tmp_path / "runs"), environment={"API_KEY": "a secret"})


def test_hosts_answer_or_are_named_with_the_reason(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ssh").write_text(SSH.format(folder=tmp_path))
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    answers = ask_hosts(dict.fromkeys(["n1", "n2", "n3"], 1), site, "ssh")
    assert answers["n3"] == {"error": "can't be reached: ssh: connect to host n3 port 22: No route to host"}
    assert answers["n1"]["code"] == answers["n2"]["code"]
    assert (answers["n1"]["skew_s"], answers["n2"]["skew_s"]) == (0.0, 0.0)
    assert list(answers["n1"]["free_bytes"]) == [str(tmp_path / "runs"), "/tmp"]
    assert "a secret" not in (tmp_path / "ssh_calls").read_text()
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("offset", "late_s", "skew_s"),
    [
        (0.0, 0.0, 0.0),
        (0.0, 30.0, 0.0),  # a thousand answers at once take their time
        (3.0, 0.0, 2.0),
        (-3.0, 0.0, -2.0),
        (-3.0, 30.0, -2.0),
        (3.0, 1.5, 0.5),
    ],
)
def test_skew_is_what_contradicts_question_and_answer(offset: float, late_s: float, skew_s: float) -> None:
    # Asked at 100; the host begins a second later, takes 10, and its answer needs another second.
    times = [101.0 + offset, 111.0 + offset]
    message = {"answer": "Welcome to n1\nclap-preflight {}\n", "code": 0, "error": "", "times": times}
    assert preflight._read(message, 112.0 + late_s, 100.0) == {"skew_s": pytest.approx(skew_s)}


def test_host_whose_script_fails() -> None:
    message: dict[str, Any] = {"answer": "", "code": 127, "error": "", "times": [1.0, 2.0]}
    assert preflight._read(message, 2.0, 1.0) == {"error": "couldn't answer: exit code 127"}
    message["error"] = "env: python3: No such file or directory"
    assert preflight._read(message, 2.0, 1.0) == {"error": "couldn't answer: env: python3: No such file or directory"}


def _run_ranks(site: Site, monkeypatch: pytest.MonkeyPatch, then: str) -> tuple[Report, list[Path]]:
    """With a script in place of launch/job.py; what is left in the run root."""
    command = [sys.executable, "-c", JOB + then]
    monkeypatch.setattr(preflight, "script_command", lambda python, name, *words: [*command, *words])
    report = Report()
    run_ranks("mine", site, {"n1": 2, "n2": 2}, "srun", 4.0, report)
    return report, list(site.root().iterdir())


def test_folder_goes_when_all_is_well(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    report, left = _run_ranks(site, monkeypatch, f"pathlib.Path(output).write_text({json.dumps(MEASURED)!r})")
    assert (report.problems, report.kept, left) == ({}, None, [])
    assert report.rows["all"] == {"bus, GB/s": "1.00"}


@pytest.mark.parametrize(
    ("then", "problem"),
    [
        ("sys.exit(3)", "the ranks failed: said by the ranks"),
        ("", "the ranks failed: said by the ranks"),  # nothing measured
        (
            """pathlib.Path(arguments.folder, "job.json").write_text('{"error": "lost n2"}'); sys.exit(1)""",
            "the ranks failed: lost n2",
        ),
        (
            f"pathlib.Path(output).write_text({json.dumps({**MEASURED, 'wrong_elements': [0, 0, 0, 7]})!r})",
            "rank 3 has 7 wrong elements after an all-reduce",
        ),
    ],
)
def test_folder_is_kept_and_named_after_a_problem(
    site: Site, monkeypatch: pytest.MonkeyPatch, then: str, problem: str
) -> None:
    report, left = _run_ranks(site, monkeypatch, then)
    assert [*report.problems] == [problem]
    assert left == [report.kept]
    assert (left[0] / "output").read_text() == "said by the ranks\n"
    assert not any("a secret" in path.read_text() for path in left[0].iterdir())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--megabytes", "-3"], "--megabytes -3: expected more than 0"),
        (["--megabytes", "nan"], "--megabytes nan: expected more than 0"),
        (["--site", "generik"], "did you mean 'generic'?"),
        ([], "inside an allocation"),
    ],
)
def test_wrong_options_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    monkeypatch.setattr(preflight.signal, "signal", lambda *_: None)  # of the tests' process
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    monkeypatch.delenv("SLURM_NODELIST", raising=False)
    assert preflight.main(options) == 2
    assert words in capsys.readouterr().err
