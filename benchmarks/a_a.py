"""Command: one configuration run again and again, and compared with itself: how often does `compare` see a difference?

    python -m benchmarks.a_a --runs 8 --output results/cpu/a_a/a_a.md

There is none, so at most 1 in 20 comparisons may have a verdict, however much else the machine does meanwhile: pairs of single
runs, without and with what all of them together say of the spread between runs, and pairs of disjoint groups of three.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import stdev
from typing import Any

from benchmarks.common import make_parser, show, table
from benchmarks.variants import CONFIG, run_bench
from clap_ds.analysis.compare import Comparison, compare
from clap_ds.analysis.record import read_record
from clap_ds.analysis.table import Run
from clap_ds.config.changes import parse_assignment, read_config
from clap_ds.config.errors import UserError, run_alone
from clap_ds.config.places import PACKAGE, work_folder

ONE_RANK = [sys.executable, str(PACKAGE / "bench.py"), "--deepspeed_config", CONFIG]
MICRO = ("clap.model.preset=micro", "clap.text_tokens=16", "clap.bench.windows=12", "clap.bench.steps_per_window=5")
RUNS = (
    "run {number} | samples/s/GPU {rate:,.2f} | interval {low:,.2f}–{high:,.2f} | what it is {what}"
    " | load average before {load:.1f} | seconds {seconds:.0f}"
)
FOUND = (
    "compared {name} | comparisons {comparisons} | lowest ratio {low:.3f} | highest ratio {high:.3f}"
    " | ratios whose interval excludes 1 {excluding} | verdicts {verdicts}"
)


def run_again_and_again(arguments: Any, folder: Path) -> list[dict[str, Any]]:
    """The runs' rows; a UserError for one that fails: fewer runs than asked for would be another experiment."""
    content, settings = read_config(arguments.config), dict(map(parse_assignment, (*MICRO, *arguments.set)))
    rows = []
    for number in range(1, arguments.runs + 1):
        load, place = os.getloadavg()[0], folder / f"{number:02}"
        row = run_bench(content, settings, place, ONE_RANK, arguments.limit_s)
        if row["state"] != "completed":
            raise UserError(f"{place}: run {number} of {arguments.runs} is {row['state']}: {row['note']}")
        rows.append(
            {"number": number, "load": load, "seconds": row["seconds"], "folder": str(next(place.glob("run-*")))}
        )
        print(f"{number}/{arguments.runs}  {row['samples_per_s_per_gpu']['mean']:,.2f} samples/s/GPU", flush=True)
    return rows


def compare_with_itself(runs: Sequence[Run], most: int = 20) -> list[dict[str, Any]]:
    """Verdicts of `compare` on up to `most` pairs of each kind, drawn without a choice to make."""
    draw = random.Random(0)
    pairs = list(itertools.combinations(runs, 2))
    pairs = draw.sample(pairs, min(most, len(pairs)))
    spread = 100 * stdev(math.log(run.rate) for run in runs if run.rate)
    singles = {"1 run and 1": None, f"1 run and 1, --run_spread {spread:.3g}": spread}
    rows = [_row(name, [compare([a], [b], known)[0] for a, b in pairs]) for name, known in singles.items()]
    if len(runs) < 6:
        return rows
    groups = [draw.sample(list(runs), 6) for _ in range(most)]
    return [*rows, _row("3 runs and 3", [compare(group[:3], group[3:])[0] for group in groups])]


def _row(name: str, found: Sequence[Comparison]) -> dict[str, Any]:
    ratios = [each.ratio for each in found]
    excluding = sum(each.interval is not None and not each.interval[0] <= 1 <= each.interval[1] for each in found)
    verdicts = [each.verdict for each in found if "not told apart" not in each.verdict]
    row = {"name": name, "comparisons": len(found), "low": min(ratios), "high": max(ratios), "excluding": excluding}
    return {**row, "verdicts": len(verdicts), "said": [each.verdict for each in found]}


def main(argv: list[str] | None = None) -> int:
    """1 where more than 1 in 20 comparisons of a kind have a verdict."""
    parser = make_parser("a_a", __doc__)
    default = PACKAGE.parent / "ds_configs" / "htsat_tiny_cpu.json"
    parser.add_argument("--config", type=Path, default=default, help="default: ds_configs/htsat_tiny_cpu.json")
    parser.add_argument("--runs", type=int, default=8, help="at least 2; from 6 on, groups of three are compared, too")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="any field of the configuration"
    )
    parser.add_argument("--folder", type=Path, help="default: runs/a_a/<time>")
    parser.add_argument("--limit_s", type=float, default=300.0, help="longest a run may take; default 300")
    parser.epilog = f"One rank each; {', '.join(MICRO)} unless --set says otherwise."
    arguments = parser.parse_args(argv)
    if arguments.runs < 2:
        raise UserError(f"--runs {arguments.runs}: expected at least 2")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends the run that is under way first
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    rows = run_again_and_again(arguments, arguments.folder or work_folder() / "runs" / "a_a" / stamp)
    runs = [read_record(Path(row["folder"])) for row in rows]
    for row, run in zip(rows, runs, strict=True):
        row |= {"rate": run.rate, "what": run.uncertainty_from.removesuffix(" of 1 run"), "windows": run.windows}
        row |= dict(zip(("low", "high"), run.interval or (), strict=False))
        del row["folder"]
    found = compare_with_itself(runs)
    title = f"# {runs[0].model} on {runs[0].device}, compared with itself\n\n{os.cpu_count()} CPU cores"
    show(arguments.output, f"{title}.\n\n{table(FOUND, found)}\n\n{table(RUNS, rows)}", {"found": found, "runs": rows})
    return int(any(20 * row["verdicts"] > row["comparisons"] for row in found))


if __name__ == "__main__":
    run_alone(main)
