"""Checks of cluster profiles with a fake SLURM."""

import json
from pathlib import Path
from typing import Any

import pytest

from clap_ds.check_runs import PACKAGES
from clap_ds.launch.cluster_profile import main
from tests.launch.conftest import FakeSlurm


def _check(tmp_path: Path, **fields: Any) -> int:
    (tmp_path / "site.json").write_text(json.dumps(fields))
    return main(["check", str(tmp_path / "site.json")])


def test_python_is_tried_in_its_wrapper_and_sbatch_asked(
    tmp_path: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.write("apptainer", '#!/bin/sh\nshift 3\nexec "$@"\n')
    (slurm.folder / "apptainer").chmod(0o755)
    container = {"wrapper": ["apptainer", "exec", "--nv", "x y.sif"], "launcher": "torchrun", "python": "python3"}
    asks = {"account": "Mine", "partition": "gpu", "sbatch": ["--qos=c"]}
    assert _check(tmp_path, setup=["module() { [ $1 = load ]; }", "module load CUDA"], **asks, **container) == 0
    python, sbatch = capsys.readouterr().out.splitlines()
    assert python.startswith("python  apptainer exec --nv 'x y.sif' python3: Python 3.")
    assert sbatch == "sbatch  accepts the options"
    expected = {"--qos=c", "--account=Mine", "--partition=gpu", "--time=00:15:00"}
    assert {line.split()[1] for line in slurm.lines("tested")} == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"python": "/no/such"}, "python: /no/such can't run this package: "),
        ({"python": "fake_python"}, "error: fake_python has no transformers"),
        ({"setup": ["true", "module load CUDA/99"]}, "module: command not found"),
    ],
)
def test_refuses_what_is_not_there(
    tmp_path: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], fields: dict[str, Any], message: str
) -> None:
    versions, said = json.dumps(dict.fromkeys(("python", *PACKAGES), "1")), "error: fake_python has no transformers"
    slurm.write("fake_python", f"#!/bin/sh\necho 'clap-check {versions}'\necho '{said}' >&2\nexit 2\n")
    (slurm.folder / "fake_python").chmod(0o755)
    assert _check(tmp_path, **fields) == 2
    assert message in capsys.readouterr().err
