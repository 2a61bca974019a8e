"""Command: what a machine's GPUs do with this project, in eight minutes, kept under `results/<device>/`.

    python -m benchmarks.gpu_check [--minutes 8] [--only NAME…]

The main number comes first, then two ranks, the variants and whether results are right, then what else there is time for. Each
step runs by itself: one that fails, hangs or finds no time left is a row of the table like any other, and the rest goes on.
Leaves what is measured to the commands it starts.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.common import exit_on_sigterm, make_parser, run_for, show, table
from clap_ds.config.errors import UserError, run_alone
from clap_ds.config.places import work_folder
from clap_ds.ranks.accelerator import choose_accelerator, nvidia_smi
from clap_ds.record.schema import RECORD_FILES

ONE_GPU = "-m clap_ds.bench --deepspeed_config ds_configs"
ALL_GPUS = "-m deepspeed.launcher.runner --quiet clap_ds/bench.py --deepspeed_config ds_configs"
TESTS = "-m pytest -v -m gpu"
LENGTHS = (
    "-m benchmarks.variants ds_configs/htsat_tiny_amp.json --vary clap.text_tokens=77,512 --limit_s 70"
    " --set clap.bench.warmup_steps=1 --set clap.bench.windows=2 --set clap.bench.steps_per_window=1"
)
PEERS = "-m benchmarks.peers --micro_batch 128 --precision bf16"
VARIANTS = (
    "-m benchmarks.variants ds_configs/htsat_tiny.json --limit_s 100"
    " --vary clap.compile=off,towers --vary clap.model.attention=sdpa,triton"
)
STEPS = {
    "htsat_tiny": (120, f"{ONE_GPU}/htsat_tiny.json"),
    "tests_on_two_gpus": (90, f"{TESTS} tests/engine/test_two_gpus.py"),
    "htsat_tiny_on_all_gpus": (90, f"{ALL_GPUS}/htsat_tiny.json"),
    "variants": (240, f"{VARIANTS} --output {{output}}/variants.md"),
    "tests": (150, f"{TESTS} --ignore tests/engine/test_two_gpus.py tests"),
    **{f"htsat_{name}": (120, f"{ONE_GPU}/htsat_{name}.json") for name in ("base", "tiny_amp", "base_amp")},
    "peers": (150, f"{PEERS} --output {{output}}/peers.md"),
    "peers_packed": (150, f"{PEERS} --text packed --caption_lengths 8 32 --output {{output}}/peers_packed.md"),
    "loss": (60, "-m benchmarks.loss_bench --output {output}/loss.md"),
    "memory_at_77_and_512_tokens": (150, f"{LENGTHS} --output {{output}}/memory.md"),
}
"""The most informative first: seconds each may take, and its command after `python`."""
SEVERAL = ("tests_on_two_gpus", "htsat_tiny_on_all_gpus")
"""Steps that need more GPUs than one."""
FEWEST_S = 20.0
"""Least time that a step is begun with; also kept for ending the last one."""
COLUMNS = (
    "step {step} | state {state} | seconds {seconds:.0f} | samples/s/GPU {samples_per_s_per_gpu[mean]:,.1f}"
    " | interval {samples_per_s_per_gpu[low]:,.1f}–{samples_per_s_per_gpu[high]:,.1f}"
    " | its coverage {samples_per_s_per_gpu[coverage]:.1%} | GPUs {world_size} | peak memory, GB {memory_gb:.1f}"
    " | reserved, GB {reserved_gb:.1f}"
)


def run_step(name: str, command: str, limit_s: float, target: Path) -> dict[str, Any]:
    """Run one step, show its output, and keep in `target` what a run it makes leaves as evidence, with its command, and the
    output where it didn't complete. Returns the table's row: the step's name, state and seconds, and the run's summary."""
    words = [word.format(output=target) for word in shlex.split(command)]
    print(f"\n== {name}: {shlex.join(words)}", flush=True)
    started_s = time.monotonic()
    with tempfile.NamedTemporaryFile("r", errors="replace") as log:
        state = run_for([sys.executable, *words], Path(log.name), limit_s)
        output = log.read()
    row = {"step": name, "state": state, "seconds": time.monotonic() - started_s}
    print(output, flush=True)
    if state != "completed":
        target.mkdir(parents=True, exist_ok=True)
        (target / "output.log").write_text(output)
    if not (found := re.search(r"^run directory: (.+)$", output, re.MULTILINE)):
        return row
    target.mkdir(parents=True, exist_ok=True)
    (target / "command.txt").write_text(f"python {command}\n")
    for path in (Path(found[1]) / file for file in (*RECORD_FILES, "flops_profile.txt")):
        if path.exists():
            shutil.copy(path, target)
    summary = target / "summary.json"
    return (json.loads(summary.read_text()) if summary.exists() else {}) | row


def report(device: str, num_gpus: int, rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown table of all steps."""
    return (
        f"# {num_gpus} × {device}, {datetime.now(UTC):%Y-%m-%d}\n\nMade by `make gpu-check`. Versions are in each folder's"
        f" `environment.json`, the command in `command.txt`.\n\n{table(COLUMNS, rows)}"
    )


def main(argv: list[str] | None = None) -> int:
    """Run the steps and keep their table as it grows; 1 where one didn't complete, a UserError where no GPU can be used."""
    parser = make_parser("gpu_check", __doc__)
    parser.add_argument("--minutes", type=float, default=8.0, help="end what runs when this time is up")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=STEPS, help="just these steps")
    arguments = parser.parse_args(argv)
    if not (found := nvidia_smi()):
        raise UserError("no NVIDIA GPU on this machine: nvidia-smi names none")
    if choose_accelerator() == "cpu":
        raise UserError("CUDA_VISIBLE_DEVICES or DS_ACCELERATOR keeps this from the GPUs")
    import torch

    num_gpus = torch.cuda.device_count()
    device = found[0].split(",")[0].strip()
    folder = work_folder() / "results" / re.sub(r"[^a-z0-9]+", "-", device.lower().replace("nvidia", "")).strip("-")
    deadline_s = time.monotonic() + 60 * arguments.minutes
    exit_on_sigterm()
    rows: list[dict[str, Any]] = []
    # A part doesn't take the place of the whole.
    output = arguments.output or folder / f"{'-'.join(arguments.only) if arguments.only else 'README'}.md"
    for name in arguments.only or STEPS:
        (most_s, command), left_s = STEPS[name], deadline_s - time.monotonic() - FEWEST_S
        if num_gpus == 1 and name in SEVERAL:
            rows.append({"step": name, "state": "left out: one GPU", "seconds": 0.0})
        elif left_s < FEWEST_S:
            rows.append({"step": name, "state": "no time left", "seconds": 0.0})
        else:
            rows.append(run_step(name, command, min(most_s, left_s), folder / name))
        show(output, report(device, num_gpus, rows), rows)
    return int(any(row["state"] not in ("completed", "left out: one GPU") for row in rows))


if __name__ == "__main__":
    run_alone(main)
