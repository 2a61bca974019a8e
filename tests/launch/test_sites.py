"""Site files: the published one, the one that needs no editing, and every kind of mistake."""

import json
import os
import re
import subprocess
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

from clap_ds.config.errors import UserError
from clap_ds.launch.sites import Site, load_site, main
from tests.launch.conftest import FakeSlurm

ROOT = Path(__file__).resolve().parents[2]


def test_packaged_sites(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "jupitr"]) == 2
    assert "did you mean 'jupiter'?" in capsys.readouterr().err
    assert main(["check", "generic"]) == 0
    site = load_site("jupiter")
    assert site.gpus_per_node == 4
    published = (
        "NCCL_IB_HCA=mlx5 NCCL_SOCKET_IFNAME=ib0 NCCL_NET_GDR_LEVEL=PHB NCCL_MIN_NCHANNELS=16 NCCL_MAX_NCHANNELS=32"
        " NCCL_BUFFSIZE=16777216 NCCL_ALGO=Tree,Ring NCCL_CROSS_NIC=1 NCCL_IB_QPS_PER_CONNECTION=2"
    )
    assert site.environment == dict(pair.split("=") for pair in published.split())
    minutes = {nodes: site.walltime(nodes)[3:5] for nodes in (1, 8, 9, 32, 64, 128, 256)}
    assert minutes == {1: "15", 8: "15", 9: "25", 32: "25", 64: "30", 128: "30", 256: "30"}
    site = load_site("generic")  # names no place
    assert not any([site.account, site.partition, site.gpus_per_node, site.environment, site.setup])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"acount": "x"}, "acount: no such field; did you mean 'account'?"),
        ({"account": 3}, "account: expected a string or null, found 3"),
        ({"gpus_per_node": 0}, "gpus_per_node: expected a whole number"),
        ({"gpus_per_node": True}, "gpus_per_node: expected a whole number"),
        ({"run_root": None}, "run_root: expected a string, found null"),
        ({"launcher": "slrum"}, "did you mean 'slurm'?"),
        ({"requeues": -1}, "requeues: expected a whole number, at least 0, found -1"),
        ({"lost_after_s": 30}, "lost_after_s: expected a whole number, at least 60, found 30"),
        ({"start_limit_s": 0}, "start_limit_s: expected a whole number, at least 1 or null"),
        ({"srun": ["container-image=x"]}, "srun: expected options such as --mpi=none"),
        ({"wrapper": "apptainer exec"}, "wrapper: expected a list of strings"),
        ({"wrapper": ["apptainer", ""]}, "wrapper: expected no empty string"),
        ({"setup": "module load x"}, "setup: expected a list of strings"),
        ({"environment": {"NCCL_DEBUG": 1}}, "environment: expected an object of strings"),
        ({"environment": {"NCCL DEBUG": "x"}}, "expected a variable's name"),
        ({"environment": {"X": "a\0b"}}, "environment.X: expected no zero byte"),
        ({"walltimes": {"8": "soon"}}, "walltimes.8: expected a SLURM time"),
        ({"walltimes": {"all": "00:10:00"}}, "walltimes.all: expected a number of nodes"),
        ({"walltimes": {}}, "walltimes: expected at least one"),
        ({"sbatch": ["--exclusive; reboot"]}, "sbatch: expected options"),
        ({"sbatch": ["--account=x"]}, "sbatch: --account is decided by the field account"),
        ({"sbatch": ["--nodes=2"]}, "sbatch: --nodes is decided when a job is submitted"),
        ({"sbatch": ["--gres=gpu:2"], "gpus_per_node": 4}, "gpus_per_node: 4, but sbatch has --gres=gpu:2"),
        ([], "expected a JSON object"),
    ],
)
def test_refuses(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "site.json"
    path.write_text(json.dumps(content))
    with pytest.raises(UserError) as caught:
        load_site(str(path))
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)


def test_launchers_by_either_name(tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "site.json"
    path.write_text('{"launcher": "pdsh", "requeues": 0}')
    assert (load_site(str(path)).chosen_launcher(), load_site(str(path)).requeues) == ("ssh", 0)
    monkeypatch.setenv("PATH", str(slurm.folder))
    assert Site().chosen_launcher() == "ssh"
    (slurm.folder / "srun").touch(0o755)
    assert Site().chosen_launcher() == "slurm"


def test_setup_lines_are_what_a_shell_needs_with_the_standard_library_alone(tmp_path: Path) -> None:
    values = {"NCCL_ALGO": "Tree,Ring", "X": 'a "b" $HOME `c` %h!\nd'}
    site = {"setup": ["export A='x y'"], "environment": values, "cpus_per_task": 8}
    path = tmp_path / "site.json"
    path.write_text(json.dumps(site))
    command = [sys.executable, "-S", str(ROOT / "launch" / "sites.py"), "setup", str(path)]
    script = f'eval "$({" ".join(map(repr, command))})"; echo "$A|$NCCL_ALGO|$X|$site_cpus_per_task|$site_run_root"'
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    shown = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True, env=environment)
    assert shown.stdout == f"x y|Tree,Ring|{values['X']}|8|runs\n"


def test_every_field_is_in_the_manual() -> None:
    manual = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \|[^|]*\| (.*?) \|", manual, re.MULTILINE))
    for each in fields(Site):
        default = each.default if each.default_factory is MISSING else each.default_factory()
        assert rows.pop(each.name, None) == f"`{json.dumps(default)}`"
    assert not rows, "no such fields"
