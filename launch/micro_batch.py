"""Inside a job: tries micro-batches, one run after the other, and makes a table of what each gave.

    python launch/micro_batch.py 8:1024:8 --config C --folder F -- python launch/job.py …      (as launch/bench.sbatch does)

`auto` looks for the largest multiple of 8 that fits, by doubling and then bisection. A micro-batch that exhausts the
memory is a row like any other. `micro_batch.json` in the folder holds the rows so far. No torch, no DeepSpeed.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

if __package__ in (None, ""):
    # By its path, as job scripts start it: of a checkout or of an installed package.
    sys.path[0] = next(str(folder) for folder in Path(__file__).resolve().parents if (folder / "clap_ds").is_dir())

from clap_ds.config.files import write_atomically
from clap_ds.launch.run_config import read_config, with_field

STEP = 8
LARGEST = 2**20
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


def row_of(micro_batch: int, told: dict[str, Any]) -> Row:
    """One line of the table from a job's `job.json` and its run's `summary.json`."""
    summary: dict[str, Any] = {}
    if told.get("run_directory"):
        path = Path(told["run_directory"]) / "summary.json"
        summary = json.loads(path.read_text()) if path.exists() else {}
    rates = summary.get("samples_per_s_per_gpu")
    completed = told.get("state") == "completed"
    return {
        "micro_batch": micro_batch,
        "samples_per_s_per_gpu": rates["median"] if completed and isinstance(rates, dict) else None,
        "tflops_per_gpu": _tflops(summary, rates["median"]) if completed and isinstance(rates, dict) else None,
        "memory_gb": summary["memory_peak_bytes"] / 1e9 if completed and summary.get("memory_peak_bytes") else None,
        "state": told.get("state", "failed"),
        "note": "" if completed else str(told.get("error") or "")[:120],
    }


def _tflops(summary: dict[str, Any], samples_per_s: float) -> float | None:
    """TFLOPS of one GPU's useful work: three forward passes' FLOPs a sample, every text position counted."""
    from clap_ds.config.model import load_preset
    from clap_ds.flop_count.analytic import TextLengths, forward_flops

    try:
        lengths = TextLengths.fixed(summary["text_tokens"])
        return 3 * forward_flops(load_preset(summary["preset"]), lengths, "model") * samples_per_s / 1e12
    except (KeyError, ValueError):
        return None


def format_table(rows: Iterable[Row]) -> str:
    lines = [f"{'micro-batch':>11}  {'samples/s/GPU':>13}  {'TFLOPS/GPU':>10}  {'memory, GB':>10}  note"]
    for row in sorted(rows, key=lambda row: int(row["micro_batch"])):
        cells = [f"{row['micro_batch']:>11}"]
        for name, width in (("samples_per_s_per_gpu", 13), ("tflops_per_gpu", 10), ("memory_gb", 10)):
            cells.append(f"{row[name]:>{width}.2f}" if row[name] is not None else " " * (width - 1) + "–")
        note = {"completed": "", "out_of_memory": "out of memory"}.get(row["state"], f"{row['state']}: {row['note']}")
        lines.append("  ".join([*cells, note]).rstrip())
    return "\n".join(lines)


class Trials:
    """Runs one micro-batch after the other, and remembers what each gave."""

    def __init__(self, config: Path, folder: Path, command: list[str]) -> None:
        self.content, self.folder, self.command = read_config(config), folder, command
        self.rows: dict[int, Row] = {}
        self.stopped = 0
        self._child: subprocess.Popen[bytes] | None = None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._pass_on)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.stopped = number
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(number)

    def fits(self, micro_batch: int) -> bool:
        """Run a micro-batch, unless it was before; False when it exhausts the memory.

        Raises:
            RuntimeError: the run failed for another reason, or the job was told to stop.
        """
        if micro_batch not in self.rows:
            self.rows[micro_batch] = self._run(micro_batch)
        row = self.rows[micro_batch]
        if self.stopped:
            raise RuntimeError(f"stopped by {signal.Signals(self.stopped).name}")
        if row["state"] not in ("completed", "out_of_memory"):
            raise RuntimeError(f"micro-batch {micro_batch}: {row['state']}: {row['note']}")
        return bool(row["state"] == "completed")

    def _run(self, micro_batch: int) -> Row:
        folder = self.folder / f"micro_batch-{micro_batch}"
        folder.mkdir(exist_ok=True)
        content = with_field(self.content, "train_micro_batch_size_per_gpu", micro_batch)
        label = f"{content.get('clap', {}).get('output', {}).get('label') or 'run'}-b{micro_batch}"
        content = with_field(content, "clap.output.label", label)
        write_atomically(str(folder / "config.json"), json.dumps(content, indent=2) + "\n")
        command = [word.replace("{folder}", str(folder)) for word in self.command]
        print(f"micro-batch {micro_batch}", flush=True)
        self._child = subprocess.Popen(command)
        self._child.wait()
        path = folder / "job.json"
        row = row_of(
            micro_batch, json.loads(path.read_text()) if path.exists() else {"state": "failed", "error": "no job.json"}
        )
        rows = [*self.rows.values(), row]
        write_atomically(str(self.folder / "micro_batch.json"), json.dumps(rows, indent=2) + "\n")
        return row


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="launch/micro_batch.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sizes", metavar="FIRST:LAST:STEP|auto")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.epilog = "After -- follows the command that runs one; {folder} in it is that run's own folder."
    words = sys.argv[1:] if argv is None else argv
    split = words.index("--") if "--" in words else len(words)
    arguments, command = parser.parse_args(words[:split]), words[split + 1 :]
    if not command:
        parser.error("no command after --")
    told: dict[str, Any] = {"state": "completed", "error": None}
    try:
        trials = Trials(arguments.config, arguments.folder, command)
        try:
            if arguments.sizes == "auto":
                best = largest_that_fits(trials.fits)
                told["largest_micro_batch"] = best
            else:
                first, last, step = map(int, arguments.sizes.split(":"))
                for size in range(first, last + 1, step):
                    trials.fits(size)
        except RuntimeError as error:
            told = {
                "state": {signal.SIGUSR1: "timeout", 0: "failed"}.get(trials.stopped, "terminated"),
                "error": str(error),
            }
        print(format_table(trials.rows.values()))
        if told.get("largest_micro_batch"):
            print(f"largest micro-batch that fits: {told['largest_micro_batch']}")
        write_atomically(str(arguments.folder / "job.json"), json.dumps(told, indent=2) + "\n")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if told["error"]:
        print(f"error: {told['error']}", file=sys.stderr)
    return 128 + trials.stopped if trials.stopped else int(told["state"] != "completed")


if __name__ == "__main__":
    sys.exit(main())
