"""Training runs in separate processes, started as users do."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import processes
from tests.conftest import micro_run
from tests.processes import ROOT as ROOT
from tests.processes import TIMEOUT_S, run
from tests.rank_pool import free_port


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", **more}


def deepspeed_launcher() -> list[str]:
    """Return the launcher's command for two local ranks."""
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner"]
    return [*launcher, "--num_gpus", "2", "--master_port", str(free_port())]


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def write_training(folder: Path, name: str = "run", **changes: Any) -> Path:
    """Write an fp32 training run of the micro preset that logs every step; runs and checkpoints go
    to `folder`. `changes`: as for `micro_run`, with `clap.train` merged into the defaults here."""
    clap = {"output": {"dir": str(folder / "runs")}, **changes.pop("clap", {})}
    clap["train"] = {"log_every_steps": 1, **clap.get("train", {})}
    plan = {"total_num_steps": 24, "warmup_num_steps": 4, "warmup_type": "linear"}
    defaults = {"bf16": {"enabled": False}, "scheduler": {"type": "WarmupCosineLR", "params": plan}}
    path = folder / f"{name}.json"
    path.write_text(json.dumps(micro_run(**{**defaults, **changes}, clap=clap), indent=2))
    return path


def make_sounds(folder: Path, *options: str) -> Path:
    """Make shards of synthetic sounds and their tokenizer."""
    run(["-m", "examples.synthetic_sounds", folder, *options], env=environment(), check=True)
    return folder


def shard_data(sounds: Path) -> dict[str, Any]:
    """Return the `data` section for shards of `examples.synthetic_sounds`."""
    paths = {"shards": str(sounds / "*.tar"), "tokenizer": str(sounds / "tokenizer")}
    return {"source": "webdataset", **paths, "num_workers": 1, "shuffle_buffer": 8}


class RunningRanks:
    """Ranks of one run as separate processes, which can be signaled alone."""

    def __init__(self, config: Path, world_size: int, *options: str) -> None:
        self.config = config
        # Without a launcher, other ranks continue after one has ended.
        constants = {"clap_ds.distributed.init.RANK_0_SPEAKS_S": 1.0}
        arguments = ["clap_ds/train.py", "--deepspeed_config", config, *options]
        self.processes = processes.ranks(
            arguments, world_size, env=environment(), constants=constants
        )
        self.outputs: list[str] = []

    def wait_for_step(self, step: int) -> None:
        """Wait until a step is recorded."""

        def is_over() -> bool:
            return any(process.poll() is not None for process in self.processes)

        wait_until(lambda: max(losses(self.config), default=0) >= step or is_over())
        assert not is_over(), (self.wait(), self.outputs)

    def signal(self, rank: int, number: signal.Signals) -> None:
        self.processes[rank].send_signal(number)

    def wait(self) -> list[int]:
        """Return exit codes by rank."""
        codes = [process.wait() for process in self.processes]
        self.outputs = [process.stdout + process.stderr for process in self.processes]
        return codes


def train(config: Path, world_size: int = 2, *options: str) -> str:
    """Run to the end, require success, and return rank 0's output."""
    ranks = RunningRanks(config, world_size, *options)
    assert ranks.wait() == [0] * world_size, "\n".join(ranks.outputs)
    return ranks.outputs[0]


def run_directories(config: Path) -> list[Path]:
    """Return the directories of all starts of a run, in order."""
    root = Path(json.loads(config.read_text())["clap"]["output"]["dir"])
    return sorted(path for path in root.glob(f"{config.stem}-*Z*") if path.is_dir())


def summaries(config: Path) -> list[dict[str, Any]]:
    return [json.loads((path / "summary.json").read_text()) for path in run_directories(config)]


def lines(config: Path, phase: str = "train") -> list[dict[str, Any]]:
    """Return the lines of `metrics.jsonl` of all starts."""
    records = []
    for directory in run_directories(config):
        path = directory / "metrics.jsonl"
        if path.exists():
            # The last line may be incomplete.
            complete = path.read_text().split("\n")[:-1]
            records += [json.loads(line) for line in complete]
    return [record for record in records if record["phase"] == phase]


def losses(config: Path) -> dict[int, float]:
    """Return the loss by step and require that every step was trained once."""
    records = lines(config)
    by_step = {record["step"]: record["loss"] for record in records}
    assert len(by_step) == len(records)
    return by_step
