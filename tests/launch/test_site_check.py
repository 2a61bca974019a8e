"""What a site says, tried on a SLURM played by scripts, and an allocation compared with it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from clap_ds.launch.site_check import problems_of_allocation
from clap_ds.launch.sites import Site, main
from tests.launch.conftest import FakeSlurm


def _check(tmp_path: Path, **fields: Any) -> int:
    (tmp_path / "site.json").write_text(json.dumps({"run_root": str(tmp_path / "runs"), **fields}))
    return main(["check", str(tmp_path / "site.json")])


def test_shows_what_it_found(tmp_path: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    module = "module() { [ $1 = load ]; }"
    assert (
        _check(tmp_path, setup=[module, "module load CUDA"], account="Mine", partition="gpu,cpu", launcher="ssh") == 0
    )
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert shown["setup"] == "2 shell lines run"
    assert shown["python"].startswith("python3: Python 3.") or re.search("/python'?: Python 3", shown["python"])
    assert "torch 2." in shown["python"]
    assert shown["partition"] == "gpu,cpu: 200 nodes with 4 GPUs, 50 nodes with no GPUs, time limit none"
    assert (shown["account"], shown["launcher"]) == ("Mine", "ssh")
    assert shown["run_root"] == f"{tmp_path / 'runs'}: writable"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"python": "/no/such"}, "python: /no/such: no such program"),
        ({"python": "no_such"}, "python: no_such: no such program on PATH"),
        ({"python": "/bin/true"}, "python: /bin/true can't run this package"),
        ({"python": "fake_python"}, "python: fake_python has no deepspeed"),
        ({"partition": "gpus"}, "partition: SLURM has no 'gpus'; did you mean 'gpu'?"),
        ({"account": "other"}, "account: 'other' is none of yours; there are mine, ours"),
        ({"setup": ["true", "module load CUDA/99"]}, "setup: 'module load CUDA/99': "),
        (
            {"setup": ["echo 'ERROR: Unable to locate a modulefile for x' >&2"]},
            "setup: ERROR: Unable to locate a module",
        ),
        ({"gpus_per_node": 8}, "gpus_per_node: 8 on each node wanted; partition gpu has 200 nodes with 4 GPUs"),
        ({"run_root": "/proc/version"}, "run_root: /proc/version isn't a folder that can be written to"),
    ],
)
def test_refuses_what_is_not_there(
    tmp_path: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], fields: dict[str, Any], message: str
) -> None:
    versions = json.dumps({"python": "3.12", "torch": "2.13", "deepspeed": None, "pydantic": "2"})
    slurm.write("fake_python", f"#!/bin/sh\necho 'clap-check {versions}'\n")
    (slurm.folder / "fake_python").chmod(0o755)
    assert _check(tmp_path, **fields) == 2
    assert message in capsys.readouterr().err


def test_says_what_it_could_not_try(tmp_path: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    slurm.remove("accounts")
    assert _check(tmp_path, wrapper=["no_apptainer", "exec", "x.sif"], python="/opt/python") == 0
    shown = capsys.readouterr().out
    assert "not checked: python /opt/python: no_apptainer isn't installed here" in shown
    assert "not checked: account: SLURM doesn't tell which are yours" in shown
    assert _check(tmp_path, srun=["--container-image=/x.sqsh"], python="/opt/python") == 0
    assert (
        "not checked: python /opt/python: it is in a container (--container-image=/x.sqsh)" in capsys.readouterr().out
    )
    slurm.write("sinfo", "#!/bin/sh\necho 'Unable to contact slurm controller' >&2\nexit 1\n")
    assert _check(tmp_path) == 0
    assert "Unable to contact slurm controller" in capsys.readouterr().out


def test_python_in_a_wrapper_is_tried_there(
    tmp_path: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.write("apptainer", '#!/bin/sh\nshift 3\nexec "$@"\n')
    (slurm.folder / "apptainer").chmod(0o755)
    assert _check(tmp_path, wrapper=["apptainer", "exec", "--nv", "x y.sif"], python="python3") == 0
    assert "apptainer exec --nv 'x y.sif' python3: Python 3." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("site", "job", "message"),
    [
        ({"account": "a"}, {"ACCOUNT": "b"}, "runs under b: give sbatch --account=a"),
        ({"account": "A"}, {"ACCOUNT": "a"}, ""),
        ({"partition": "gpu,big"}, {"PARTITION": "big"}, ""),
        ({"partition": "big"}, {"PARTITION": "gpu"}, "runs in gpu: give sbatch --partition=big"),
        ({"gpus_per_node": 4}, {"PARTITION": "gpu"}, "was given none: give sbatch --gres=gpu:4"),
        ({"gpus_per_node": 4}, {"PARTITION": "gpu", "GPUS": "0,1,2,3"}, ""),
        ({"gpus_per_node": 4, "environment": {"DS_ACCELERATOR": "cpu"}}, {"PARTITION": "gpu"}, ""),
        ({"gpus_per_node": 4}, {"PARTITION": "cpu"}, ""),  # SLURM knows of none there: the nodes may have some
        ({"account": "a", "partition": "b", "gpus_per_node": 4}, {}, ""),  # outside of a job
    ],
)
def test_allocations_that_are_not_the_sites(
    slurm: FakeSlurm, site: dict[str, Any], job: dict[str, str], message: str
) -> None:
    problems = problems_of_allocation(Site(**site), {f"SLURM_JOB_{name}": value for name, value in job.items()})
    assert len(problems) == (message != "")
    assert message in "".join(problems)
    assert all("launch/submit.py" in problem for problem in problems)
