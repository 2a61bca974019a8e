"""Command: settings of a run tried one against the other on this machine, a short run each: which are the quickest here?

    python -m benchmarks.tune ds_configs/htsat_tiny.json --vary clap.compile=off,towers,towers-max-autotune

Runs every combination and makes a table of samples/s/GPU with its interval and the ratio to the first. One that fails, doesn't
fit or takes too long is a row like any other. Output, settings and run directory of each are kept in the folder, whose
`tune.json` holds the rows so far. No torch, no DeepSpeed.
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
from clap_ds.config.errors import UserError, run_alone
from clap_ds.config.overrides import parse_varied
from clap_ds.config.paths import PACKAGE, work_folder

BENCH = [sys.executable, "-m", "clap_ds.distributed.local_launch", str(PACKAGE / "bench.py"), "--deepspeed_config"]
"""A run's command, on all GPUs of this machine, before the name of its JSON."""
SHORT = [f"clap.bench.{each}" for each in ("warmup_steps=5", "windows=6", "steps_per_window=4", "breakdown_steps=0")]
COLUMNS = (
    "settings {settings} | samples/s/GPU {samples_per_s_per_gpu[mean]:,.2f}"
    " | range of windows {samples_per_s_per_gpu[low]:,.2f}–{samples_per_s_per_gpu[high]:,.2f} | ratio {ratio:.3f}"
    " | memory, GB {peak_gb:.2f} | seconds {seconds:.0f} | state {state} | note {note}"
)


def format_table(rows: Sequence[dict[str, Any]]) -> str:
    """Ratios are to the first that has a rate."""
    rates = [(row.get("samples_per_s_per_gpu") or {}).get("mean") for row in rows]
    first = next(filter(None, rates), 1.0)
    return table(COLUMNS, [row | {"ratio": rate and rate / first} for row, rate in zip(rows, rates, strict=True)])


def main(argv: list[str] | None = None) -> int:
    """Run every combination, the last field changing quickest, and keep the rows and their table as they come. 1 where no run
    completed, a UserError where the configuration or an option is wrong."""
    parser = make_parser("tune", __doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--vary", action="append", required=True, metavar="NAME=VALUE,VALUE…", help="any field; repeat")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="any field, for all of them")
    parser.add_argument("--folder", type=Path, help="default: runs/tune/<config>-<time>")
    parser.add_argument("--limit_s", type=float, default=300.0, help="longest a run may take; default 300")
    parser.epilog = f"Runs are short ({', '.join(SHORT)}) unless --set says otherwise."
    exit_on_sigterm()
    arguments = parser.parse_args(argv)
    varied = [
        [f"{name}={each if isinstance(each, str) else json.dumps(each)}" for each in values]
        for name, values in map(parse_varied, arguments.vary)
    ]
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    folder = arguments.folder or work_folder() / "runs" / "tune" / f"{arguments.config.stem}-{stamp}"
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
