"""Inside a job: tries micro-batches, one run after the other, and lists what each gave.

    python -m clap_ds.launch.micro_batch 8:1024:8 --config C --folder F -- python -m clap_ds.launch.job --folder {folder} …

`auto` looks for the largest multiple of 8 that fits, by doubling and then bisection. A micro-batch that exhausts the
memory is a row like any other, and so is one that fails in another way where a smaller one completed: a kernel that can't be
launched at that size shows as some CUDA error. `micro_batch.json` in the folder holds the rows so far. No torch.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from clap_ds.config.errors import exit_code_of
from clap_ds.config.files import read_object, write_object
from clap_ds.launch.run_config import read_config, with_field

STEP, LARGEST = 8, 2**20
Row = dict[str, Any]


def largest_that_fits(fits: Callable[[int], bool], step: int = STEP, largest: int = LARGEST) -> int | None:
    """Largest multiple of `step` that fits, given that whatever fits does so in smaller size, too; None when none does.

    Doubles from `step` until one doesn't fit, then halves the interval between: about 2·log2(answer / step) tries.
    """
    if not fits(step):
        return None
    low = step
    while low * 2 <= largest and fits(low * 2):
        low *= 2
    high = min(low * 2, largest + step)
    while high - low > step:
        middle = (low + high) // 2 // step * step
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def row_of(micro_batch: int, job: dict[str, Any]) -> Row:
    """One line of the table from a job's `job.json` and its run's `summary.json`."""
    completed, run = job.get("state") == "completed", job.get("run_directory")
    summary = read_object(Path(run) / "summary.json") if completed and run else {}
    memory_bytes = summary.get("memory_peak_bytes")
    return {
        "micro_batch": micro_batch,
        "samples_per_s_per_gpu": summary.get("samples_per_s_per_gpu", {}).get("mean"),
        "tflops_per_gpu": summary.get("achieved_tflops"),
        "memory_gb": memory_bytes / 1e9 if memory_bytes else None,
        "state": job.get("state", "failed"),
        "note": "" if completed else str(job.get("error") or "")[:120],
    }


def shown(row: Row) -> str:
    """A row as a line of the log."""
    names = {"samples_per_s_per_gpu": "samples/s/GPU", "tflops_per_gpu": "TFLOPS/GPU", "memory_gb": "GB"}
    numbers = [f"{row[name]:.2f} {unit}" for name, unit in names.items() if row[name] is not None]
    state = {"completed": [], "out_of_memory": ["out of memory"]}.get(row["state"], [f"{row['state']}: {row['note']}"])
    return f"micro-batch {row['micro_batch']}: {', '.join([*numbers, *state])}"


class StoppedError(Exception):
    """A run that ended in a way that its size can't be why: the state of the whole job, and what to say."""


class Trials:
    def __init__(self, config: Path, folder: Path, command: list[str]) -> None:
        self.content, self.folder, self.command = read_config(config), folder, command
        self.rows: dict[int, Row] = {}
        self.stopped = False
        self._child: subprocess.Popen[bytes] | None = None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._pass_on)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """The run records that it was stopped, and is the last one."""
        self.stopped = True
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(number)

    def fits(self, micro_batch: int) -> bool:
        """Run a micro-batch, unless it was before: whether it completed."""
        if micro_batch not in self.rows:
            if self.stopped:
                raise StoppedError("terminated", f"stopped before micro-batch {micro_batch}")
            self.rows[micro_batch] = self._run(micro_batch)
            write_object(self.folder / "micro_batch.json", list(self.rows.values()))
        row = self.rows[micro_batch]
        completed = [size for size, each in self.rows.items() if each["state"] == "completed"]
        is_too_large = row["state"] == "failed" and min(completed, default=micro_batch) < micro_batch
        if row["state"] not in ("completed", "out_of_memory") and not is_too_large:
            raise StoppedError(row["state"], f"micro-batch {micro_batch}: {row['state']}: {row['note']}")
        return bool(row["state"] == "completed")

    def _run(self, micro_batch: int) -> Row:
        folder = self.folder / f"micro_batch-{micro_batch}"
        folder.mkdir(exist_ok=True)
        content = with_field(self.content, "train_micro_batch_size_per_gpu", micro_batch)
        content.pop("train_batch_size", None)  # it is the micro-batch that is looked for
        label = f"{content.get('clap', {}).get('output', {}).get('label') or 'run'}-b{micro_batch}"
        write_object(folder / "run.json", with_field(content, "clap.output.label", label))
        print(f"micro-batch {micro_batch}", flush=True)
        self._child = subprocess.Popen([word.replace("{folder}", str(folder)) for word in self.command])
        self._child.wait()
        path = folder / "job.json"
        return row_of(micro_batch, read_object(path) if path.exists() else {"error": "the job left no job.json"})

    def run(self, sizes: str) -> int:
        """Try `FIRST:LAST:STEP` or `auto`; show and record what came of it. The exit code."""
        job: dict[str, Any] = {"state": "completed", "error": None}
        try:
            if sizes == "auto":
                job["largest_micro_batch"] = largest_that_fits(self.fits)
            else:
                first, last, step = map(int, sizes.split(":"))
                for size in range(first, last + 1, step):
                    self.fits(size)
        except StoppedError as stopped:
            job["state"], job["error"] = stopped.args
        write_object(self.folder / "job.json", job)
        print("", *(shown(self.rows[size]) for size in sorted(self.rows)), sep="\n")
        if largest := job.get("largest_micro_batch"):
            next_one = self.rows.get(min((size for size in self.rows if size > largest), default=0), {})
            why = (
                f" ({next_one['micro_batch']} failed: {next_one['note']})" if next_one.get("state") == "failed" else ""
            )
            print(f"largest micro-batch that fits: {largest}{why}")
        if job["error"]:
            print(f"error: {job['error']}", file=sys.stderr)
        return int(job["state"] != "completed")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="launch/micro_batch.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sizes", metavar="FIRST:LAST:STEP|auto")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("command", nargs="+", metavar="-- COMMAND", help="runs one; {folder} in it is its own folder")
    arguments = parser.parse_args(argv)
    return exit_code_of(lambda: Trials(arguments.config, arguments.folder, arguments.command).run(arguments.sizes))


if __name__ == "__main__":
    sys.exit(main())
