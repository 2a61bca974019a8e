"""What a site says, tried on a SLURM played by scripts."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from clap_ds.check_runs import PACKAGES
from clap_ds.launch.sites import main
from tests.launch.conftest import FakeSlurm


def _check(tmp_path: Path, **fields: Any) -> int:
    (tmp_path / "site.json").write_text(json.dumps({"run_root": str(tmp_path / "runs"), **fields}))
    return main(["check", str(tmp_path / "site.json")])


def test_shows_what_it_found(tmp_path: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    module = "module() { [ $1 = load ]; }"
    assert _check(tmp_path, setup=[module, "module load CUDA"], account="Mine", launcher="pdsh") == 0
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert shown["setup"] == "2 shell lines run"
    assert shown["python"].startswith("python3: Python 3.") or re.search("/python'?: Python 3", shown["python"])
    assert "torch 2." in shown["python"]
    assert (shown["sbatch"], shown["launcher"]) == ("would take it", "pdsh")
    assert shown["run_root"] == f"{tmp_path / 'runs'}: writable"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"python": "/no/such"}, "python: /no/such can't run this package: bash: line 4: /no/such: No such file or"),
        ({"python": "/bin/true"}, "python: /bin/true can't run this package"),
        ({"python": "fake_python"}, "python: fake_python has no transformers"),
        ({"setup": ["true", "module load CUDA/99"]}, "setup: 'module load CUDA/99': "),
        ({"setup": ["echo ${NOT_SET}"]}, "NOT_SET: unbound variable"),
        (
            {"setup": ["echo 'ERROR: Unable to locate a modulefile for x' >&2"]},
            "setup: ERROR: Unable to locate a module",
        ),
        ({"run_root": "/proc/version"}, "run_root: /proc/version isn't a folder that can be written to"),
    ],
)
def test_refuses_what_is_not_there(
    tmp_path: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], fields: dict[str, Any], message: str
) -> None:
    versions = {"python": "3.12", **dict.fromkeys(PACKAGES, "1"), "transformers": None}
    said = "error: fake_python has no transformers: see"
    slurm.write("fake_python", f"#!/bin/sh\necho 'clap-check {json.dumps(versions)}'\necho '{said}' >&2\nexit 2\n")
    (slurm.folder / "fake_python").chmod(0o755)
    assert _check(tmp_path, **fields) == 2
    assert message in capsys.readouterr().err


def test_account_and_partition_are_judged_by_sbatch(
    tmp_path: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.write(
        "sbatch", f"#!/bin/sh\ncat > '{slurm.folder}/script'\necho 'sbatch: error: invalid account' >&2\nexit 1\n"
    )
    assert _check(tmp_path, account="a", partition="b", sbatch=["--qos=c"]) == 2
    assert "error: sbatch would refuse it: invalid account\n" in capsys.readouterr().err
    lines = (slurm.folder / "script").read_text().splitlines()
    assert {f"#SBATCH --{each}" for each in ("account=a", "partition=b", "qos=c", "time=00:15:00")} <= {*lines}


def test_says_what_it_could_not_try(tmp_path: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    slurm.write("refuse_test", "sbatch: error: Unable to contact slurm controller (connect failure)\n")
    container = {"launcher": "torchrun", "python": "/opt/python"}
    for fields in ({"wrapper": ["no_apptainer", "exec", "x.sif"]}, {"srun": ["--container-image=/x.sqsh"]}):
        assert _check(tmp_path, **container, **fields) == 0
        shown = capsys.readouterr().out
        assert f"not checked: python /opt/python: it is in a container that isn't here: {sys.executable} is tr" in shown
        assert "not checked: partition, account, nodes and time: sbatch --test-only: Unable to contact slurm" in shown


def test_python_in_a_wrapper_is_tried_there(
    tmp_path: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.write("apptainer", '#!/bin/sh\nshift 3\nexec "$@"\n')
    (slurm.folder / "apptainer").chmod(0o755)
    wrapper = ["apptainer", "exec", "--nv", "x y.sif"]
    assert _check(tmp_path, wrapper=wrapper, python="python3", launcher="torchrun") == 0
    assert "apptainer exec --nv 'x y.sif' python3: Python 3." in capsys.readouterr().out
