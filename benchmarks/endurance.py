"""Command: what is lost when training is killed, its disk is full, or its checkpoints can't be read.

    python -m benchmarks.endurance --kills 50 --ranks 2 --output results/cpu/endurance/kills_2.md
    python -m benchmarks.endurance --disks 12 --output results/cpu/endurance/disks.md      # needs root, for a small file system
    python -m benchmarks.endurance --reads --output results/cpu/endurance/reads.md

Trains the micro model again and again by the command users type. A line that isn't as it must be says LOST.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common import make_parser, show, table
from clap_ds.config.arguments import whole_number
from clap_ds.config.errors import UserError, exit_code_of
from clap_ds.config.settings import load_run
from clap_ds.ranks.hostfile import free_port
from clap_ds.weights import checkpoint_files as files

TRAIN = str(Path(files.__file__).parents[1] / "train.py")
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
LIMIT_S = 120.0
BEYOND_S = 4.0  # the time until some checkpoints are there: a run is left alone up to so long
HURRIED = """
import runpy, sys
from clap_ds.ranks import rendezvous
rendezvous.START_LIMIT_S = 15.0
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
FAILING = """
import errno, os, runpy, sys
folder, number = sys.argv[1], int(sys.argv[2])
sys.argv = sys.argv[3:]
def look(event, arguments):
    global number
    path = arguments[0] if event in ("open", "os.listdir", "os.scandir") else None
    if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(folder + "/step-") and (
        event != "open" or "r" in (arguments[1] or "r")
    ):
        number -= 1
        if number == 0:
            print("one read fails", flush=True)
            raise OSError(errno.EIO, os.strerror(errno.EIO), os.fspath(path))
sys.addaudithook(look)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def write_run(folder: Path, samples: int, every_steps: int = 5) -> Path:
    """A micro run, with dropout, that logs each step."""
    clap = {
        "model": {"preset": "micro", "drop_path": 0.2, "text_dropout": 0.2},
        "text_tokens": 16,
        "train": {"samples": samples, "log_every_steps": 1},
        "checkpoint": {"every_steps": every_steps, "folder": str(folder / "checkpoints")},
        "output": {"root": str(folder / "runs")},
    }
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
    batch = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0}
    config = folder / "run.json"
    config.write_text(json.dumps({**batch, "bf16": {"enabled": True}, "optimizer": optimizer, "clap": clap}))
    return config


@contextmanager
def training(config: Path, num_ranks: int, *before: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Ranks of a run, rank 0's output in `output` beside its configuration; killed at the end."""
    port = str(free_port())
    with (config.parent / "output").open("w") as output:
        ranks = []
        for rank in range(num_ranks):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks), "MASTER_PORT": port}
            env = {**os.environ, **place, "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
            to = output if rank == 0 else subprocess.DEVNULL
            command = [sys.executable, "-u", *(before or ("-c", HURRIED)), TRAIN, "--deepspeed_config", str(config)]
            pipes: dict[str, Any] = {"stdout": to, "stderr": subprocess.STDOUT, "text": True}
            # Background jobs of a shell ignore SIGINT, and what they start does, too.
            ranks.append(
                subprocess.Popen(
                    command, env=env, **pipes, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
                )
            )
        try:
            yield ranks
        finally:
            for process in ranks:
                process.kill()
                process.wait()


def said(config: Path) -> str:
    return (config.parent / "output").read_text()


def step_of(path: Path | None) -> int:
    return files.Manifest.read(path).step if path else 0


def last_saved(text: str) -> int:
    return max(map(int, re.findall(r"^saved .*step-(\d+)(?:-\d+)?:", text, re.MULTILINE)), default=0)


def finish(config: Path, num_ranks: int, *before: str) -> tuple[int, str]:
    """Exit code and output of a run that nobody stops."""
    with training(config, num_ranks, *before) as ranks:
        return ranks[0].wait(timeout=10 * LIMIT_S), said(config)


def kills(folder: Path, number: int, num_ranks: int) -> list[dict[str, Any]]:
    """Signals at random moments to random ranks; then what the whole of it learned, against a run that nobody stopped."""
    chance, config = random.Random(7), write_run(folder, 10**9)
    checkpoints, longest_s, before = folder / "checkpoints", 0.0, 0
    count: Counter[str] = Counter()
    for kill in range(number):
        which = chance.choice(SIGNALS)
        with training(config, num_ranks) as ranks:
            begin = time.monotonic()
            if kill == 0:  # how long a start and some checkpoints take here
                while last_saved(said(config)) < 20 and time.monotonic() - begin < LIMIT_S:
                    time.sleep(0.05)
                longest_s = time.monotonic() - begin + BEYOND_S
            else:
                time.sleep(chance.uniform(0.0, longest_s))
            chance.choice(ranks).send_signal(which)
            end = time.monotonic() + LIMIT_S
            while any(process.poll() is None for process in ranks) and time.monotonic() < end:
                time.sleep(0.02)
            count["hung"] += any(process.poll() is None for process in ranks)
        text = said(config)
        found = step_of(files.newest_good(checkpoints))
        announced = max(before, last_saved(text))
        count["lost"] += found < announced
        resumed = re.search(r"resuming from .*: step (\d+)", text)
        if "training to" in text:
            count["silently anew"] += before > 0 and (resumed is None or int(resumed[1]) < before)
            count["resumed"] += resumed is not None
        count[which.name] += 1
        count["amid a checkpoint"] += any(path.name.startswith(".step") for path in checkpoints.glob(".*"))
        before = found
    whole = folder / "whole"
    whole.mkdir()
    finish(write_run(whole, before * 2 * num_ranks, 1000), num_ranks)
    losses = [losses_of(path, before) for path in (folder, whole)]
    same = losses[0] == losses[1] and len(losses[0]) == before
    names = ("lost", "hung", "resumed", "silently anew", "amid a checkpoint", *(which.name for which in SIGNALS))
    row: dict[str, Any] = {name.replace(" ", "_"): count[name] for name in names}
    row |= {"ranks": num_ranks, "signals": number, "steps": before}
    row["losses"] = "the same to the bit" if same else "LOST: they differ"
    return [row]


def losses_of(folder: Path, last: int) -> dict[int, float]:
    lines = map(json.loads, (folder / "checkpoints" / "history.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if line["phase"] == "train" and line["step"] <= last}


def disks(folder: Path, number: int) -> list[dict[str, Any]]:
    """Training that goes on from a checkpoint, with logs and checkpoints on a file system with ever less room."""
    if os.geteuid() != 0:
        raise UserError("--disks: a small file system can be mounted by root alone")
    config = write_run(folder, 4, 1)
    finish(config, 1)
    size = sum(path.stat().st_size for path in (folder / "checkpoints").rglob("*"))
    shutil.rmtree(folder / "checkpoints")
    rows = []
    for step in range(number):
        room = 3.2 * size * (number - step - 1) / number
        disk = folder / f"disk{step}"
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512m", "tmpfs", disk], check=True)
        try:
            finish(write_run(disk, 4, 1), 1)
            taken = shutil.disk_usage(disk).used
            subprocess.run(["mount", "-o", f"remount,size={int(taken + room) // 4096 * 4096}", disk], check=True)
            config = write_run(disk.parent, 4, 1)  # beside the small disk, with its output
            content = json.loads(config.read_text())
            content["clap"]["train"]["samples"] = 14
            content["clap"]["checkpoint"]["folder"] = str(disk / "checkpoints")
            content["clap"]["output"]["root"] = str(disk / "runs")
            config.write_text(json.dumps(content))
            code, text = finish(config, 1)
            found = step_of(files.newest_good(disk / "checkpoints"))
            runs = sorted((disk / "runs").glob("*/summary.json"))
            state = json.loads(runs[-1].read_text())["state"] if "run directory" in text else "refused"
        finally:
            subprocess.run(["umount", disk], check=True)
        is_right = (code == 0) == (found == 7) and found >= max(2, last_saved(text)) and state != "running"
        rows.append({
            "room": room / size, "code": code, "state": state, "step": found, "given_up": text.count("is given up"),
            "failed": text.count("could not be saved"), "verdict": "as it must be" if is_right else "LOST",
            "traceback": "Traceback" in text,
        })  # fmt: skip
    return rows


def reads(folder: Path) -> list[dict[str, Any]]:
    """Resuming where one read of a checkpoint's files fails, for each of them in turn."""
    config = write_run(folder, 12)
    finish(write_run(folder, 12, 1), 1)
    checkpoints = load_run(config).checkpoint_folder
    names = sorted(path.name for path in checkpoints.glob("step-*"))
    count: Counter[str] = Counter()
    for number in range(1, 1000):
        code, text = finish(config, 1, "-c", FAILING, str(checkpoints), str(number))
        if "one read fails" not in text:
            break
        resumed = re.search(r"resuming from .*: step (\d+)", text)
        if code == 2 and "error: " in text and "Traceback" not in text:
            count["refused, exit code 2"] += 1
        elif code == 0 and resumed is not None:
            older = int(resumed[1]) < 3
            count[
                "went on from an older one, said" if older and "passed over" in text else "LOST" if older else "resumed"
            ] += 1
        else:
            print(text, file=sys.stderr)
            count["LOST"] += 1
        if not set(names) <= {path.name for path in checkpoints.glob("step-*")}:
            count["LOST"] += 1
    return [{"what": what, "times": times} for what, times in sorted(count.items())]


def main() -> None:
    parser = make_parser("endurance", __doc__)
    parser.add_argument("--kills", type=whole_number(2), metavar="N", help="signals at random moments")
    parser.add_argument("--ranks", type=whole_number(), default=1, metavar="N", help="of --kills (default 1)")
    parser.add_argument("--disks", type=whole_number(2), metavar="N", help="file systems of shrinking size")
    parser.add_argument("--reads", action="store_true", help="read errors, one in each start")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if options.kills:
            rows = kills(folder, options.kills, options.ranks)
            columns = (
                "ranks {ranks} | signals {signals} | resumed {resumed} | amid a checkpoint {amid_a_checkpoint} | "
                "announced and lost {lost} | silently anew {silently_anew} | hung {hung} | steps {steps} | losses {losses}"
            )
        elif options.disks:
            rows = disks(folder, options.disks)
            columns = (
                "room, checkpoints {room:.2f} | exit code {code} | state {state} | newest good step of 7 {step} | "
                "given up {given_up} | saves that failed {failed} | verdict {verdict}"
            )
        elif options.reads:
            rows = reads(folder)
            columns = "what came of it {what} | failing reads {times}"
        else:
            raise UserError("nothing to do: give --kills, --disks or --reads")
    show(options.output, table(columns, rows), rows)


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
