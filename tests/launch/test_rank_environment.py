"""Which of the batch step's variables reach ranks."""

import pytest

from clap_ds.launch.rank_environment import rank_environment


@pytest.mark.parametrize(
    "name",
    [
        "HOSTNAME", "PWD", "_", "TERM", "TERM_PROGRAM", "SSH_AUTH_SOCK", "XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS",
        "BASH_FUNC_module%%", "CUDA_VISIBLE_DEVICES", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
        "MASTER_ADDR", "MASTER_PORT", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "TORCHELASTIC_RUN_ID", "SLURMD_NODENAME",
        "SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID", "SLURM_STEP_ID", "SLURM_STEPID", "SLURM_TASKS_PER_NODE",
        "SLURM_JOB_GPUS", "CLAP_JOB", "CLAP_PROGRESS",
    ],
)  # fmt: skip
def test_one_hosts_or_launchers_own_stay_behind(name: str) -> None:
    assert rank_environment({name: "1", "KEPT": "2"}, {}) == {"KEPT": "2"}


@pytest.mark.parametrize(
    "name",
    [
        "PATH", "HOME", "USER", "LD_LIBRARY_PATH", "NCCL_ALGO", "HF_TOKEN", "OMP_NUM_THREADS", "SLURM_JOB_ID",
        "SLURM_JOB_NODELIST", "SLURM_RESTART_COUNT", "HOSTALIASES", "MY_RANK", "RANKING", "XDG_CACHE_HOME", "TMPDIR",
        "WANDB_DIR", "CLAP_DATA",
    ],
)  # fmt: skip
def test_everything_else_is_passed_whole(name: str) -> None:
    value = "a b\n'\"$x\\é=1"
    assert rank_environment({name: value}, {}) == {name: value}


def test_site_keeps_back_and_adds() -> None:
    own = {"AWS_KEY": "1", "AWS": "2", "aws_key": "3", "TOKEN": "4", "A": "own"}
    site = {"A": "site", "AWS_REGION": "here"}
    expected = {"AWS": "2", "aws_key": "3", "A": "site", "AWS_REGION": "here"}
    assert rank_environment(own, site, ["AWS_*", "TOKEN"]) == expected
    assert own["A"] == "own"
