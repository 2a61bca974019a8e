"""Command: what is lost when training is killed at random moments.

    python -m benchmarks.endurance --kills 50 --ranks 2 --output results/cpu/endurance/kills_2.md

Trains the micro model again and again by the command users type, then once without a signal, and compares the losses.
"""

from __future__ import annotations

import json
import os
import random
import re
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
from clap_ds.config.errors import run_alone
from clap_ds.ranks.hostfile import free_port
from clap_ds.weights import checkpoint_files as files

TRAIN = str(Path(files.__file__).parents[1] / "train.py")
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
LIMIT_S = 120.0
BEYOND_S = 10.0  # the time until some checkpoints are there: a run is left alone up to so long
WRITE_S = 0.3  # beyond what a file of a micro model takes: signals then find one being written
HURRIED = """
import runpy, sys, time
from clap_ds.ranks import rendezvous
from clap_ds.training import checkpoint
rendezvous.START_LIMIT_S, write = 15.0, checkpoint.write_tensors
checkpoint.write_tensors = lambda *file: (time.sleep({write_s}), write(*file))[1]
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
COLUMNS = (
    "ranks {ranks} | signals {signals} | resumed {resumed} | amid a checkpoint {amid_a_checkpoint}"
    " | announced and lost {lost} | silently anew {silently_anew} | hung {hung} | steps {steps} | losses {losses}"
)


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
def training(config: Path, num_ranks: int, write_s: float = 0.0) -> Iterator[list[subprocess.Popen[str]]]:
    """Ranks of a run, `write_s` slower to write a file of it, rank 0's output in `output` there, too; killed at the end."""
    common = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    with (config.parent / "output").open("w") as output:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-u", "-c", HURRIED.format(write_s=write_s), TRAIN, "--deepspeed_config", str(config)],
                env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.DEVNULL if rank else output,
                stderr=subprocess.STDOUT,
                text=True,
                # Background jobs of a shell ignore SIGINT, and what they start does, too.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
            for rank in range(num_ranks)
        ]
        try:
            yield ranks
        finally:
            for process in ranks:
                process.kill()
                process.wait()


def last_saved(text: str) -> int:
    return max(map(int, re.findall(r"^saved .*step-(\d+)(?:-\d+)?:", text, re.MULTILINE)), default=0)


def interrupted(
    config: Path, num_ranks: int, chance: random.Random, longest_s: float | None
) -> tuple[float, bool, bool, str]:
    """Train and signal a random rank at a random moment, the first time once some checkpoints are there. Seconds until then,
    whether one was being written, whether the run was left hanging, and rank 0's output."""
    output = config.parent / "output"
    with training(config, num_ranks, WRITE_S) as ranks:
        begin = time.monotonic()
        if longest_s is None:
            while last_saved(output.read_text()) < 20 and time.monotonic() - begin < LIMIT_S:
                time.sleep(0.05)
        else:
            time.sleep(chance.uniform(0.0, longest_s))
        took_s = time.monotonic() - begin
        amid = any((config.parent / "checkpoints").glob(".step*.partial"))
        chance.choice(ranks).send_signal(chance.choice(SIGNALS))
        end = time.monotonic() + LIMIT_S
        while (running := any(rank.poll() is None for rank in ranks)) and time.monotonic() < end:
            time.sleep(0.02)
    return took_s, amid, running, output.read_text()


def kills(folder: Path, number: int, num_ranks: int) -> dict[str, Any]:
    """Signals at random moments to random ranks; then what the whole of it learned, against a run that nobody stopped."""
    chance, config, checkpoints = random.Random(7), write_run(folder, 10**9), folder / "checkpoints"
    longest_s, before, count = None, 0, Counter[str]()
    for _ in range(number):
        took_s, amid, hung, text = interrupted(config, num_ranks, chance, longest_s)
        longest_s = longest_s or took_s + BEYOND_S
        newest = files.newest_good(checkpoints)
        found = files.Manifest.read(newest).step if newest else 0
        resumed = re.search(r"resuming from .*: step (\d+)", text)
        started = "training to" in text
        count["hung"] += hung
        count["lost"] += found < max(before, last_saved(text))
        count["silently_anew"] += started and before > 0 and (resumed is None or int(resumed[1]) < before)
        count["resumed"] += started and resumed is not None
        count["amid_a_checkpoint"] += amid
        before = found
    (whole := folder / "whole").mkdir()
    with training(write_run(whole, before * 2 * num_ranks, 1000), num_ranks) as ranks:
        ranks[0].wait(timeout=10 * LIMIT_S)
    ours, theirs = (losses_of(path, before) for path in (folder, whole))
    same = ours == theirs and len(ours) == before
    row = {"ranks": num_ranks, "signals": number, "steps": before, **count}
    return {**row, "losses": "the same to the bit" if same else "LOST: they differ"}


def losses_of(folder: Path, last: int) -> dict[int, float]:
    lines = map(json.loads, (folder / "checkpoints" / "history.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if line["phase"] == "train" and line["step"] <= last}


def main(argv: list[str] | None = None) -> None:
    parser = make_parser("endurance", __doc__)
    parser.add_argument("--kills", type=whole_number(2), default=20, metavar="N", help="signals (default 20)")
    parser.add_argument("--ranks", type=whole_number(), default=1, metavar="N", help="default 1")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        row = kills(Path(folder), options.kills, options.ranks)
    show(options.output, table(COLUMNS, [row]), row)


if __name__ == "__main__":
    run_alone(main)
