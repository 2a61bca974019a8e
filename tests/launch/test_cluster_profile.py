"""Cluster profiles: Jupiter's, the generic one, every kind of mistake, and checks."""

import json
import os
import subprocess
import sys
from functools import partial

import pytest

from clap_ds.check_runs import PACKAGES
from clap_ds.launch.cluster_profile import (
    PROFILE,
    ClusterProfile,
    check_environment,
    job_file,
    load_profile,
)
from clap_ds.utils.errors import UserError
from tests.conftest import ROOT


def test_profile_of_jupiter_has_the_published_values():
    profile = load_profile("jupiter")
    assert (profile.partition, profile.gpus_per_node, profile.cpus_per_task) == ("booster", 4, 72)
    assert "/PROJECT/" in profile.environment["HF_HOME"], "the manual tells users to edit this"
    assert sum(name.startswith("NCCL_") for name in profile.environment) == 9
    minutes = [profile.walltime(nodes)[3:5] for nodes in (8, 9, 33, 256)]
    assert minutes == ["15", "25", "30", "30"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"launcher": "slrum"}, "did you mean 'slurm'?"),
        ({"walltimes": {}}, "walltimes: expected"),
        ({"acount": "x"}, "acount: no such field; did you mean 'account'?"),
        ({"srun": ["--container-image=x"]}, "--container-image=x needs launcher torchrun"),
        ({"environment": {"NCCL_DEBUG": 1}}, "environment: expected dict[str, str], found"),
        ({"walltimes": {"8": "soon"}}, "walltimes.8: 'soon'"),
    ],
)
def test_wrong_field_is_rejected_with_file_and_name(tmp_path, content, message):
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(content))
    with pytest.raises(UserError) as raised:
        load_profile(str(path))
    assert str(raised.value).startswith(f"{path}: ")
    assert message in str(raised.value)


def test_unknown_profile_is_rejected_with_the_nearest_name():
    with pytest.raises(UserError, match="did you mean 'jupiter'"):
        load_profile("jupitr")


def test_file_is_found_by_its_former_name_if_only_that_exists(tmp_path):
    (tmp_path / "site.json").touch()
    assert job_file(tmp_path, PROFILE) == tmp_path / "site.json"
    (tmp_path / PROFILE).touch()
    assert job_file(tmp_path, PROFILE) == tmp_path / PROFILE


@pytest.mark.parametrize("name", ["slurm_hostfile", "sweep"])
def test_command_runs_as_a_file_of_a_bare_checkout(name):
    """The package is missing, or the Python is too old for it."""
    path = str(ROOT / "launch" / f"{name}.py")
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    run = partial(subprocess.run, capture_output=True, text=True, env=env, cwd="/")
    done = run([sys.executable, "-S", path, "--help"])
    assert (done.returncode, done.stderr) == (0, "")
    old = "import runpy, sys; sys.version_info = (3, 6, 8); runpy.run_path(sys.argv[1], run_name='__main__')"
    done = run([sys.executable, "-c", old, path])
    assert "requires Python 3.11 or newer" in done.stderr


# --- checks with the ranks' Python


def test_python_is_checked_in_its_container(tmp_path, slurm):
    slurm.write_program("apptainer", 'shift 3\nexec "$@"')
    setup = ["module() { [ $1 = load ]; }", "module load CUDA"]
    container = ["apptainer", "exec", "--nv", "x y.sif"]
    profile = ClusterProfile(wrapper=container, python="python3", setup=setup)
    assert check_environment(profile).startswith("apptainer exec --nv 'x y.sif' python3: Python 3.")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"python": "fake_python"}, "^fake_python has no transformers"),
        ({"setup": ["true", "module load CUDA/99"]}, "module: command not found"),
    ],
)
def test_missing_python_package_or_module_is_rejected(slurm, fields, message):
    versions = json.dumps(dict.fromkeys(("python", *PACKAGES), "1"))
    problem = "error: fake_python has no transformers"
    slurm.write_program(
        "fake_python", f"echo 'clap-check {versions}'\necho '{problem}' >&2\nexit 2"
    )
    with pytest.raises(UserError, match=message):
        check_environment(ClusterProfile(**fields))
