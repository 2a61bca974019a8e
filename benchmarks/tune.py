"""Find the fastest settings of a run on this machine with a short run of each combination.

    python -m benchmarks.tune --config ds_configs/htsat_tiny.json --vary clap.compile=off,towers,towers-max-autotune

Writes a table of samples/s/GPU with range and ratio to the first. A failed combination becomes a
row, too. The folder keeps the output, settings and run directory of each, and the rows so far in
`variants.json`. Imports neither torch nor DeepSpeed.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import changed, exit_on_sigterm, make_parser, run_config, show, table
from clap_ds.config.arguments import add_config, parse_varied
from clap_ds.distributed.hostfile import free_port
from clap_ds.utils.errors import UserError, run_alone
from clap_ds.utils.paths import PACKAGE, work_folder

LAUNCHER = [
    sys.executable,
    "-m",
    "deepspeed.launcher.runner",
    "--quiet",
    "--master_port",
    str(free_port()),
]
BENCH = [*LAUNCHER, str(PACKAGE / "bench.py"), "--deepspeed_config"]
"""Command of a run on all GPUs of this machine; its JSON's name follows."""
SHORT = [
    f"clap.bench.{each}"
    for each in ("warmup_steps=5", "windows=6", "steps_per_window=4", "breakdown_steps=0")
]
COLUMNS = (
    "settings {settings} | samples/s/GPU {samples_per_s_per_gpu[mean]:,.2f}"
    " | range of windows {samples_per_s_per_gpu[min]:,.2f}–{samples_per_s_per_gpu[max]:,.2f} | ratio {ratio:.3f}"
    " | s/step {step_time_s[median]:.3f} | memory, GB {peak_gb:.2f} | TFLOPS, factor 3 {achieved_tflops:.3f}"
    " | TFLOPS with recomputation, up to 4 {hardware_tflops:.3f} | seconds {seconds:.0f} | state {state} | note {note}"
)


def format_table(rows: Sequence[dict[str, Any]]) -> str:
    """Format rows as a table, with ratios to the first row that has a rate."""
    rates = [(row.get("samples_per_s_per_gpu") or {}).get("mean") for row in rows]
    first = next(filter(None, rates), 1.0)
    return table(
        COLUMNS,
        [row | {"ratio": rate and rate / first} for row, rate in zip(rows, rates, strict=True)],
    )


def main(argv: list[str] | None = None) -> int:
    """Run every combination, the last field changing fastest, and save rows and table after each.
    Return 1 if no run completed; UserError if the configuration or an option is wrong."""
    parser = make_parser(__doc__)
    add_config(parser)
    vary = "values to try of a field; repeatable"
    parser.add_argument("--vary", action="append", required=True, metavar="FIELD=A,B,…", help=vary)
    parser.add_argument(
        "--folder", type=Path, help="output folder (default: runs/variants/<config>-<time>)"
    )
    parser.add_argument(
        "--limit_s", type=float, default=300.0, help="time limit of a run in s (default: 300)"
    )
    parser.epilog = f"Runs are short ({', '.join(SHORT)}) unless --set overrides this."
    exit_on_sigterm()
    arguments = parser.parse_args(argv)
    varied = [
        [f"{name}={each if isinstance(each, str) else json.dumps(each)}" for each in values]
        for name, values in map(parse_varied, arguments.vary)
    ]
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    folder = (
        arguments.folder or work_folder() / "runs" / "tune" / f"{arguments.config.stem}-{stamp}"
    )
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"--folder {folder}: expected a new or empty folder")
    rows: list[dict[str, Any]] = []
    for number, settings in enumerate(itertools.product(*varied), start=1):
        own = folder.resolve() / f"{number:02}"
        print(f"{number}  {', '.join(settings)}, in {own}", flush=True)
        run = changed(arguments.config, [*SHORT, *arguments.set, *settings])
        row = run_config(run, [*BENCH, str(own / "config.json")], own, arguments.limit_s)
        rows.append({"settings": ", ".join(settings), **row})
        show(arguments.output or folder / "tune.md", format_table(rows), rows)
    return int(all(row["state"] != "completed" for row in rows))


if __name__ == "__main__":
    run_alone(main)
