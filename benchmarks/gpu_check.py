"""Benchmark and test this project on a GPU, in three calls of nine minutes; results go to
`results/<device>/`.

    python -m benchmarks.gpu_check 1 [--minutes 9] [--output FOLDER]

Steps are independent: one that fails, hangs or has no time left becomes a row. docs/gpus.md
describes the calls.
"""

from __future__ import annotations

import json
import lzma
import os
import re
import shlex
import shutil
import sys
import tarfile
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import changed, exit_on_sigterm, run_config, show, table
from clap_ds.config.arguments import make_parser
from clap_ds.distributed.accelerator import choose_accelerator, nvidia_smi
from clap_ds.flop_count.device_specs import find_peak
from clap_ds.utils.errors import UserError, run_alone
from clap_ds.utils.paths import cache_folder, work_folder


class Check(NamedTuple):
    """`run`: a configuration's name and changed fields. `command`: arguments of `python`.
    `variables`: its environment's. `least_gpus`: with fewer the step is left out."""

    most_s: float
    run: str = "htsat_tiny"
    command: str = "-m clap_ds.bench --deepspeed_config {config}"
    variables: tuple[str, ...] = ()
    least_gpus: int = 1


ALL_GPUS = "-m deepspeed.launcher.runner --num_gpus {num_gpus} clap_ds/bench.py --deepspeed_config {config}"
PROFILE = "-m benchmarks.plan_validation --deepspeed_config {config}"
JOIN = (
    "-m benchmarks.plan_validation --profiles {call}/.. --gpu {gpu} --output {call}/efficiencies.md"
)
GRADIENTS = "-m benchmarks.gradient_check --deepspeed_config {config}"
TESTS = "-m pytest -v -p no:cacheprovider -m gpu"
PEERS = (
    "-m benchmarks.compare_baselines --micro_batch {micro_batch} --precision bf16 --rounds 3"
    " --output {folder}/peers.md --against"
)
SAME = "clap.model.drop_path=0 clap.model.text_dropout=0 clap.model.spec_augment=false"
LOSSES = f"htsat_tiny {SAME} clap.bench.warmup_steps=18 clap.bench.steps_per_window=1 clap.bench.windows=2"
TORCHS_TEXT_ATTENTION = "htsat_tiny clap.model.text_attention_impl=torch"
HALF = (
    "htsat_tiny train_micro_batch_size_per_gpu=308"  # the baselines' full batch doesn't fit 80 GB
)
SOUNDS = "-m examples.synthetic_sounds {call}/data --clips 1232 --shards 8 --seconds 10 --sample_rate 48000 --format wav"
PREPARE = "-m clap_ds.shards prepare {call}/data/*.tar {call}/data/prepared --kind waveform --preset htsat_tiny_roberta_base"
SHARDS = '{"source": "webdataset","shards":"{call}/data/prepared/*.tar","tokenizer":"{call}/data/tokenizer"}'
# Steps by call, the most informative first, after those they depend on.
CALLS = {
    1: {
        "kernels": Check(150, command="-m benchmarks.kernel_times --output {folder}/kernels.md"),
        "htsat_tiny": Check(210),
        "profile_compiled": Check(80, "htsat_tiny clap.compile=towers", PROFILE),
        "gradients": Check(150, command=f"{GRADIENTS} --output {{folder}}/gradients.md"),
        "htsat_base": Check(200, "htsat_base"),
        "all_gpus": Check(120, command=ALL_GPUS, least_gpus=2),
        "all_gpus_deepspeed": Check(
            90, "htsat_tiny clap.gradient_sync=deepspeed", ALL_GPUS, least_gpus=2
        ),
        "text_attention_torch": Check(100, TORCHS_TEXT_ATTENTION),
        "htsat_tiny_again": Check(60),
        "text_attention_torch_again": Check(60, TORCHS_TEXT_ATTENTION),
    },
    2: {
        "losses_eager": Check(70, f"{LOSSES} clap.compile=off"),
        "losses_compiled": Check(240, f"{LOSSES} clap.compile=towers"),
        "compile_off": Check(80, "htsat_tiny clap.compile=off"),
        "profile_eager": Check(60, "htsat_tiny clap.compile=off", PROFILE),
        "attention_sdpa": Check(100, "htsat_tiny clap.model.attention_impl=sdpa"),
        "mlp_torch": Check(100, "htsat_tiny clap.model.mlp_impl=torch"),
        "mlp_triton_gelu": Check(100, "htsat_tiny clap.model.mlp_impl=triton_gelu"),
        "max_autotune": Check(170, "htsat_tiny clap.compile=towers-max-autotune"),
        **{
            path.stem: Check(90, command=f"{TESTS} {path}")
            for path in sorted((work_folder() / "tests").rglob("test_*.py"), reverse=True)
            if "mark.gpu" in path.read_text()
        },
        "environment": Check(30, command="-m torch.utils.collect_env"),
        "efficiencies": Check(180, command=JOIN),
    },
    3: {
        "htsat_tiny_amp": Check(70, "htsat_tiny_amp"),
        "loops": Check(150, command=f"{PEERS} loops"),
        "loops_half": Check(90, HALF, f"{PEERS} loops"),
        "transformers_half": Check(90, HALF, f"{PEERS} transformers"),
        "htsat_base_amp": Check(70, "htsat_base_amp"),
        "sounds": Check(60, command=SOUNDS),
        "prepare": Check(60, command=PREPARE),
        "from_shards": Check(90, f"htsat_tiny 'clap.data={SHARDS}'"),
        "mix_order_off": Check(100, variables=("TORCHINDUCTOR_MIX_ORDER_REDUCTION=0",)),
    },
}
SHORT = "tensorboard.enabled=false clap.bench.warmup_steps=5 clap.bench.windows=3 clap.bench.breakdown_steps=2"
# Minimum remaining time to start a step; also reserved to end the last one.
FEWEST_S = 20.0
BULKY = (".tar", ".ttir", ".ttgir", ".llir", ".source")
COLUMNS = (
    "step {step} | state {state} | seconds {seconds:.0f} | samples/s/GPU {samples_per_s_per_gpu[mean]:,.1f}"
    " | range {samples_per_s_per_gpu[min]:,.1f}–{samples_per_s_per_gpu[max]:,.1f} | peak memory, GB {peak_gb:.1f}"
    " | reserved, GB {reserved_peak_gb:.1f} | context, GB {context_gb:.2f}"
    " | compiling, s {compile_s:.0f} | losses off by {loss_difference:.1e} | note {note}"
)


def run_step(step: Check, folder: Path, limit_s: float, gpu: str, num_gpus: int) -> dict[str, Any]:
    """Run one step in a new folder, print its output and return its table row."""
    call = folder.parent
    # Fields and values of the configuration.
    name, *assignments = shlex.split(step.run.replace("{call}", str(call)))
    content = changed(Path(name), [*SHORT.split(), *assignments])
    values: dict[str, Any] = {
        "gpu": gpu,
        "num_gpus": num_gpus,
        "call": call,
        "folder": folder,
        "config": folder / "config.json",
        "micro_batch": content["train_micro_batch_size_per_gpu"],
    }
    arguments = [argument.format_map(values) for argument in shlex.split(step.command)]
    print(f"\n== {folder.name}: {shlex.join(arguments)}", flush=True)
    command = ["env", *step.variables, sys.executable, *arguments]
    try:
        row = run_config(content, command, folder, limit_s)
    finally:
        print((folder / "output.log").read_text(errors="replace"), flush=True)
    row["losses"] = []
    for path in folder.glob("run-*/metrics.jsonl"):
        for line in path.read_text().splitlines():
            # Other records, and a killed run's last line, have no loss.
            with suppress(ValueError, KeyError):
                row["losses"].append(json.loads(line)["loss"])
    return row


def archive(folder: Path, root: Path, target: Path, since_s: float = 0.0) -> None:
    """Archive a folder's files that changed since a time, by their paths in `root`, without shards
    and intermediate code."""
    draft = target.with_name(f".{target.name}")
    try:
        files = [
            path
            for path in sorted(folder.rglob("*"))
            if path.is_file() and not path.name.endswith(BULKY) and path.stat().st_mtime >= since_s
        ]
        if not files:
            return
        with tarfile.open(draft, "w:xz", preset=0) as tar:
            for path in files:
                tar.add(path, path.relative_to(root))
        draft.replace(target)
    except OSError as error:
        # Such as a full disk: the next steps still print what they measure.
        print(f"warning: {target} can't be written: {error}", flush=True)


def restore(archives: Iterable[Path], target: Path) -> None:
    for path in archives:
        with (
            suppress(OSError, EOFError, tarfile.TarError, lzma.LZMAError),
            tarfile.open(path) as tar,
        ):
            tar.extractall(target, filter="data")


def compare_losses(rows: list[dict[str, Any]]) -> None:
    """Add the largest relative difference of compiled losses from eager ones to their row."""
    # Losses are compared as soon as both steps have run.
    steps = {row["step"]: row for row in rows}
    if not steps.keys() >= {"losses_eager", "losses_compiled"}:
        return
    compiled = steps["losses_compiled"]
    # A step that failed has no losses.
    pairs = zip(compiled.get("losses", []), steps["losses_eager"].get("losses", []), strict=False)
    differences = [abs(compiled_loss / eager_loss - 1) for compiled_loss, eager_loss in pairs]
    compiled["loss_difference"] = max(differences, default=None)


def main(argv: list[str] | None = None) -> int:
    """Run a call's steps, and save table and archives after each. Return 1 if one isn't complete;
    UserError without a GPU."""
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("call", type=int, choices=CALLS, help="part of the check to run")
    add("--minutes", type=float, default=9.0, help="time limit of the call (default: 9)")
    output_help = "results folder (default: results/<device>)"
    add("--output", type=Path, metavar="FOLDER", help=output_help)
    options = parser.parse_args(argv)
    deadline_s = time.monotonic() + 60 * options.minutes
    # One line per GPU.
    gpus = nvidia_smi()
    if not gpus or choose_accelerator() == "cpu":
        checks = "check nvidia-smi, CUDA_VISIBLE_DEVICES and DS_ACCELERATOR"
        raise UserError(f"no NVIDIA GPU found: {checks}")
    exit_on_sigterm()
    device = gpus[0].split(",")[0].strip()
    known_gpu = find_peak(device)
    gpu = known_gpu.name if known_gpu else device
    # `NVIDIA H200` becomes `h200`.
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower().replace("nvidia", "")).strip("-")
    results = options.output or work_folder() / "results" / slug
    results.mkdir(parents=True, exist_ok=True)
    folder = work_folder() / "runs" / "gpu_check" / slug / f"call{options.call}"
    shutil.rmtree(folder, ignore_errors=True)
    # Continue with compiled code and profiles of earlier calls.
    caches = cache_folder("gpu_check")
    restore([*results.glob("caches*.tar.xz")], caches.parent)
    profiles = f"call[!{options.call}]_profile_*.tar.xz"
    restore([*results.glob(profiles)], folder.parent.parent)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{caches}/inductor"
    os.environ["TRITON_CACHE_DIR"] = f"{caches}/triton"
    rows: list[dict[str, Any]] = []
    for name, step in CALLS[options.call].items():
        if len(gpus) < step.least_gpus:
            continue
        row: dict[str, Any] = {"step": name, "state": "no time left", "seconds": 0.0}
        rows.append(row)
        began_s = time.time()
        # What remains must suffice to end the step and to save results.
        left_s = deadline_s - time.monotonic() - FEWEST_S
        try:
            if left_s >= FEWEST_S:
                # Stays, if this call is ended now.
                row["state"] = "interrupted"
                row |= run_step(step, folder / name, min(step.most_s, left_s), gpu, len(gpus))
        finally:
            # Also if this call is ended.
            compare_losses(rows)
            title = f"# {device}, {datetime.now(UTC):%Y-%m-%d}"
            show(folder / "table.md", f"{title}\n\n{table(COLUMNS, rows)}", rows)
            shutil.copy(folder / "table.md", results / f"call{options.call}.md")
            efficiencies = folder / "efficiencies.json"
            if efficiencies.exists():
                shutil.copy(efficiencies, results)
            archive(folder / name, folder.parent, results / f"call{options.call}_{name}.tar.xz")
            # Later archives extend earlier ones.
            number = len([*results.glob("caches*")])
            archive(caches, caches.parent, results / f"caches_{number:03}.tar.xz", began_s)
    return int(any(row["state"] != "completed" for row in rows))


if __name__ == "__main__":
    run_alone(main)
