"""Site files: the published one, the one that needs no editing, and every kind of mistake."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clap_ds.config.errors import UserError
from clap_ds.launch.sites import load_site, main, rank_environment

ROOT = Path(__file__).resolve().parents[2]


def test_packaged_sites(capsys: pytest.CaptureFixture[str]) -> None:
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
        ({"launcher": "pdhs"}, "did you mean 'pdsh'?"),
        ({"setup": "module load x"}, "setup: expected a list of strings"),
        ({"environment": {"NCCL_DEBUG": 1}}, "environment: expected an object of strings"),
        ({"environment": {"NCCL DEBUG": "x"}}, "expected a variable's name"),
        ({"environment": {"X": "$(reboot)"}}, "environment.X: expected no quotes"),
        ({"environment": {"X": "a\nb"}}, "environment.X: expected no quotes"),
        ({"walltimes": {"8": "soon"}}, "walltimes.8: expected a SLURM time"),
        ({"walltimes": {"all": "00:10:00"}}, "walltimes.all: expected a number of nodes"),
        ({"walltimes": {}}, "walltimes: expected at least one"),
        ({"sbatch": ["--exclusive; reboot"]}, "sbatch: expected options"),
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


def test_setup_lines_are_what_a_shell_needs_with_the_standard_library_alone(tmp_path: Path) -> None:
    site = {"setup": ["export A='x y'"], "environment": {"NCCL_ALGO": "Tree,Ring"}, "python": "/opt/my python"}
    path = tmp_path / "site.json"
    path.write_text(json.dumps(site))
    command = [sys.executable, "-S", str(ROOT / "launch" / "sites.py"), "setup", str(path)]
    script = f'eval "$({" ".join(map(repr, command))})"; echo "$A|$NCCL_ALGO|$site_python|$site_run_root"'
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    shown = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True, env=environment)
    assert shown.stdout == "x y|Tree,Ring|/opt/my python|runs\n"


def test_ranks_get_what_they_need_and_nothing_that_breaks() -> None:
    site = load_site("jupiter")
    needed = {"PATH": "/bin", "HF_HOME": "/h"}
    others = {"HOME": "/root", "SECRET": "s", "NCCL_ALGO": "Ring", "LANG": 'a"b', "TMPDIR": "", "HF_X": "%h"}
    assert rank_environment(site, needed | others) == needed | site.environment
