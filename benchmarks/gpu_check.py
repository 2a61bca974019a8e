"""Command: every GPU test and benchmark on one GPU, in under eight minutes, kept under `results/<device>/`.

    python -m benchmarks.gpu_check [--minutes 8] [--only NAME…]

Each step runs by itself: one that fails or finds no time left is said so in the table and the rest goes on. Leaves what is
measured to the commands it starts, and imports neither torch nor DeepSpeed.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = "{output}"
"""Stands in a command for the folder in which the step's evidence is kept."""
KEPT_FILES = ("config.json", "environment.json", "summary.json", "metrics.jsonl", "flops_profile.txt")


@dataclass(frozen=True)
class Step:
    """One command, and how long it may take at most."""

    name: str
    command: list[str]
    limit_s: float


@dataclass
class Outcome:
    step: Step
    state: str
    seconds: float
    run_directory: Path | None = None


def plan() -> list[Step]:
    """All steps, the most informative first."""
    python = [sys.executable]
    bench = [*python, "-m", "deepspeed.launcher.runner", "--num_gpus", "1", "clap_ds/bench.py", "--deepspeed_config"]
    evidence = [
        *python,
        "-m",
        "benchmarks.memory_evidence",
        "--deepspeed_config",
        "ds_configs/htsat_tiny_amp.json",
    ]
    peers = [*python, *["-m", "benchmarks.peers", "--micro-batch", "128", "--precision", "bf16"]]
    varied = ["clap.compile=off,step", "clap.model.attention=auto,triton", "clap.cuda_graphs=false,true"]
    variants = [
        *python,
        "benchmarks/variants.py",
        "ds_configs/htsat_tiny.json",
        "--limit_s",
        "150",
        "--table",
        f"{OUTPUT}/table.md",
    ]
    for each in varied:
        variants += ["--vary", each]
    return [
        Step("tests", [*python, "-m", "pytest", "-q", "-m", "gpu", "tests"], 180),
        *[
            Step(name, [*bench, f"ds_configs/{name}.json"], 120)
            for name in ("htsat_tiny", "htsat_base", "htsat_tiny_amp", "htsat_base_amp")
        ],
        Step(
            "cost_table",
            [*python, "-m", "benchmarks.cost_table", "--micro-batch", "616", "--output", f"{OUTPUT}/cost.md"],
            120,
        ),
        Step("peers", [*peers, "--json", f"{OUTPUT}/peers.json"], 150),
        Step(
            "peers_packed",
            [*peers, *["--text", "packed", "--caption-lengths", "8", "32"], "--json", f"{OUTPUT}/peers_packed.json"],
            150,
        ),
        Step("loss", [*python, "-m", "benchmarks.loss_bench", "--output", OUTPUT], 60),
        Step("memory_at_77_and_512_tokens", [*evidence, "--json", f"{OUTPUT}/memory.json"], 150),
        Step("variants", variants, 500),  # takes more than is left after the others: --only variants
    ]


def run_step(step: Step, limit_s: float, folder: Path) -> Outcome:
    """Run one step with its output shown and searched for the run directory it makes; `folder` is where evidence is kept."""
    command = [word.replace(OUTPUT, str(folder / step.name)) for word in step.command]
    if command != step.command:
        (folder / step.name).mkdir(parents=True, exist_ok=True)
    print(f"\n== {step.name}: {' '.join(command)}", flush=True)
    started_s = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        output, _ = process.communicate(timeout=min(limit_s, step.limit_s))
        state = "completed" if process.returncode == 0 else f"exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        process.terminate()
        output, _ = process.communicate()
        state = f"stopped after {min(limit_s, step.limit_s):.0f} s"
    print(output, flush=True)
    found = re.search(r"^run directory: (.+)$", output, re.MULTILINE)
    return Outcome(step, state, time.monotonic() - started_s, Path(found[1]) if found else None)


def device() -> tuple[str, str]:
    """Name of the first GPU and a folder name made of it, such as `h200`."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        name = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        print("error: no NVIDIA GPU on this machine: nvidia-smi names none", file=sys.stderr)
        raise SystemExit(2) from None
    return name, re.sub(r"[^a-z0-9]+", "-", name.lower().replace("nvidia", "")).strip("-")


def keep(outcome: Outcome, folder: Path) -> dict[str, Any]:
    """Copy what a run leaves as evidence, with its command; returns its summary."""
    if outcome.run_directory is None:
        return {}
    target = folder / outcome.step.name
    target.mkdir(parents=True, exist_ok=True)
    for name in KEPT_FILES:
        if (outcome.run_directory / name).exists():
            shutil.copy(outcome.run_directory / name, target / name)
    python = Path(sys.executable).name
    (target / "command.txt").write_text(" ".join([python, *outcome.step.command[1:]]) + "\n")
    summary = target / "summary.json"
    return dict(json.loads(summary.read_text())) if summary.exists() else {}


def report(device_name: str, outcomes: list[Outcome], summaries: list[dict[str, Any]]) -> str:
    """Markdown table of all steps."""
    lines = [
        f"# One {device_name}, {datetime.now(UTC):%Y-%m-%d}",
        "",
        "Made by `make gpu-check`. Versions are in each folder's `environment.json`, the command in `command.txt`.",
        "",
        "| step | state | seconds | samples/s/GPU | 95 % interval | peak memory, GiB |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for outcome, summary in zip(outcomes, summaries, strict=True):
        rate = summary.get("samples_per_s_per_gpu") or {}
        median = f"{rate['median']:,.1f}" if rate else "–"
        interval = f"{rate['low']:,.1f}–{rate['high']:,.1f}" if rate else "–"
        memory = f"{summary['memory_peak_bytes'] / 2**30:.1f}" if "memory_peak_bytes" in summary else "–"
        state = summary.get("state", outcome.state) if outcome.state == "completed" else outcome.state
        lines.append(f"| {outcome.step.name} | {state} | {outcome.seconds:.0f} | {median} | {interval} | {memory} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks/gpu_check.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=8.0, help="stop starting steps when this time is up")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=[step.name for step in plan()], help="just these steps"
    )
    arguments = parser.parse_args()
    device_name, folder_name = device()
    folder = ROOT / "results" / folder_name
    folder.mkdir(parents=True, exist_ok=True)
    deadline_s = time.monotonic() + 60 * arguments.minutes
    outcomes = []
    for step in plan():
        if arguments.only and step.name not in arguments.only:
            continue
        left_s = deadline_s - time.monotonic()
        outcomes.append(run_step(step, left_s, folder) if left_s > 20 else Outcome(step, "no time left", 0.0))
    summaries = [keep(outcome, folder) for outcome in outcomes]
    text = report(device_name, outcomes, summaries)
    # A part doesn't take the place of the whole.
    (folder / ("-".join(arguments.only) + ".md" if arguments.only else "README.md")).write_text(text)
    print(text)
    return int(any(outcome.state != "completed" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
