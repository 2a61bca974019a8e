"""The real runs that `benchmarks.validate_projection` evaluates: `benchmarks.paced_bench` on 1 to 4 shaped hosts."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from clap_ds.analysis.runs import InputError
from clap_ds.config.places import PACKAGE

METHODS = ("deepspeed", "overlapped")
NUM_HOSTS = 4
BUCKET_MB = 1.0
JOINT_DIM = 8192
MICRO_BATCH = 4


def run_trials(folder: Path, rates_mbit: Sequence[float], pause_s: float, windows: int, repeats: int) -> None:
    """Run both methods on 1 to 4 hosts at each rate; run directories go to `<folder>/<rate>mbit/`.

    Raises:
        InputError: no root, no iproute2, or a rank failed.
    """
    from benchmarks.shaped_hosts import ShapedHostsError, run_on_all, shaped_hosts

    _write_preset(folder / "presets")
    try:
        with shaped_hosts(NUM_HOSTS) as hosts:
            for rate in rates_mbit:
                hosts.shape(rate)
                configs = [_write_config(folder, f"{rate:g}mbit", method, windows) for method in METHODS]
                for num_hosts in [*range(1, NUM_HOSTS + 1)] * repeats:
                    print(f"{rate:g} Mbit/s, {num_hosts} hosts …", file=sys.stderr, flush=True)
                    command = [
                        "unshare", "--uts", "sh", "-c", 'hostname "host$RANK" && exec "$@"', "sh", sys.executable, "-m",
                        "benchmarks.paced_bench", *map(str, configs), "--pause_s", str(pause_s),
                        "--presets", str(folder / "presets"),
                    ]  # fmt: skip
                    run_on_all(hosts, num_hosts, command, {"CUDA_VISIBLE_DEVICES": ""}, _free_port())
    except ShapedHostsError as error:
        raise InputError(str(error)) from error


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def _write_preset(folder: Path) -> None:
    """A CLAP with many parameters and wide features for its FLOPs, so that sending takes longer than computing."""
    preset = json.loads((PACKAGE / "config" / "presets" / "micro.json").read_text())
    preset["audio"]["num_samples"] = 24000
    preset["text"] |= {
        "vocab_size": 1000,
        "hidden_size": 256,
        "num_layers": 5,
        "num_heads": 4,
        "intermediate_size": 1024,
    }
    preset["joint_dim"] = JOINT_DIM
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "paced.json").write_text(json.dumps(preset, indent=2))


def _write_config(folder: Path, name: str, method: str, windows: int) -> Path:
    clap = {
        "model": {"preset": "paced", "drop_path": 0.0, "text_dropout": 0.0, "spec_augment": False},
        "text_tokens": 4,
        "gradient_sync": method,
        "gradient_bucket_mb": BUCKET_MB,
        "bench": {"warmup_steps": 2, "windows": windows, "steps_per_window": 1, "breakdown_steps": 1},
        "output": {"root": str(folder / name), "label": method},
    }
    config = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 0},
        "bf16": {"enabled": True},
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "clap": clap,
    }
    path = folder / f"{name}-{method}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config, indent=2))
    return path
