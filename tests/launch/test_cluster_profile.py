"""Cluster profiles: Jupiter's, the generic one, every kind of mistake, and checks."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clap_ds.check_runs import PACKAGES
from clap_ds.launch.cluster_profile import ClusterProfile, check_environment, load_profile
from clap_ds.utils.errors import UserError
from tests.launch.conftest import FakeSlurm

ROOT = Path(__file__).resolve().parents[2]


def test_packaged_sites() -> None:
    with pytest.raises(UserError, match="did you mean 'jupiter'"):
        load_profile("jupitr")
    site = load_profile("jupiter")
    assert (site.partition, site.gpus_per_node, site.cpus_per_task) == ("booster", 4, 72)
    published = (
        "NCCL_IB_HCA=mlx5 NCCL_SOCKET_IFNAME=ib0 NCCL_NET_GDR_LEVEL=PHB NCCL_MIN_NCHANNELS=16 NCCL_MAX_NCHANNELS=32"
        " NCCL_BUFFSIZE=16777216 NCCL_ALGO=Tree,Ring NCCL_CROSS_NIC=1 NCCL_IB_QPS_PER_CONNECTION=2"
    )
    rest = {name: value for name, value in site.environment.items() if name != "HF_HOME"}
    assert rest == dict(pair.split("=") for pair in published.split())
    assert "/PROJECT/" in site.environment["HF_HOME"], "the manual tells users to edit this"
    minutes = {nodes: site.walltime(nodes)[3:5] for nodes in (1, 8, 9, 32, 64, 128, 256)}
    assert minutes == {1: "15", 8: "15", 9: "25", 32: "25", 64: "30", 128: "30", 256: "30"}
    site = load_profile("generic")  # has no cluster-specific values
    assert not any([site.account, site.partition, site.gpus_per_node, site.environment, site.setup])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"acount": "x"}, "acount: no such field; did you mean 'account'?"),
        ({"gpus_per_node": "4"}, 'gpus_per_node: expected int | None, found "4"'),
        ({"launcher": "slrum"}, "did you mean 'slurm'?"),
        (
            {"launcher": "slurm", "srun": ["--container-image=x"]},
            "--container-image=x needs launcher torchrun",
        ),
        ({"setup": "module load x"}, "setup: expected list[str], found"),
        ({"environment": {"NCCL_DEBUG": 1}}, "environment: expected dict[str, str], found"),
        ({"walltimes": {"8": "soon"}}, "walltimes.8: 'soon'"),
        (
            {"wrapper": ["apptainer"], "requeues": 0, "gpus_per_node": None},
            "apptainer needs launcher torchrun",
        ),
    ],
)
def test_refuses(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(content))
    with pytest.raises(UserError) as caught:
        load_profile(str(path))
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["slurm_hostfile", "submit", "sweep"])
def test_runs_as_a_file_of_a_bare_checkout(name: str) -> None:
    """The package is missing, or the Python is too old for it."""
    path = ROOT / "launch" / f"{name}.py"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [sys.executable, "-S", path, "--help"], capture_output=True, text=True, env=kept, cwd="/"
    )
    assert (done.returncode, done.stderr) == (0, "")
    old = "import runpy, sys; sys.version_info = (3, 6, 8); runpy.run_path(sys.argv[1], run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", old, path], capture_output=True, text=True, env=kept, cwd="/"
    )
    assert "requires Python 3.11 or newer" in done.stderr


# --- checks with the ranks' Python


def test_python_is_tried_in_its_wrapper(tmp_path: Path, slurm: FakeSlurm) -> None:
    slurm.write("apptainer", '#!/bin/sh\nshift 3\nexec "$@"\n')
    (slurm.folder / "apptainer").chmod(0o755)
    setup = ["module() { [ $1 = load ]; }", "module load CUDA"]
    site = ClusterProfile(
        wrapper=["apptainer", "exec", "--nv", "x y.sif"],
        launcher="torchrun",
        python="python3",
        setup=setup,
    )
    assert check_environment(site).startswith("apptainer exec --nv 'x y.sif' python3: Python 3.")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"python": "/no/such"}, "/no/such: No such file"),
        ({"python": "fake_python"}, "^fake_python has no transformers"),
        ({"setup": ["true", "module load CUDA/99"]}, "module: command not found"),
    ],
)
def test_refuses_what_is_not_there(slurm: FakeSlurm, fields: dict[str, Any], message: str) -> None:
    versions = json.dumps(dict.fromkeys(("python", *PACKAGES), "1"))
    said = "error: fake_python has no transformers"
    slurm.write(
        "fake_python", f"#!/bin/sh\necho 'clap-check {versions}'\necho '{said}' >&2\nexit 2\n"
    )
    (slurm.folder / "fake_python").chmod(0o755)
    with pytest.raises(UserError, match=message):
        check_environment(ClusterProfile(**fields))
