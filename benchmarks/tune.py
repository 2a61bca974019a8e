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
# Command of a run on all GPUs of this machine; its JSON's name follows.
BENCH = [*LAUNCHER, str(PACKAGE / "bench.py"), "--deepspeed_config"]
SHORT = (
    "clap.bench.warmup_steps=5",
    "clap.bench.windows=6",
    "clap.bench.steps_per_window=4",
    "clap.bench.breakdown_steps=0",
)
COLUMNS = (
    "settings {settings} | samples/s/GPU {samples_per_s_per_gpu[mean]:,.2f}"
    " | range of windows {samples_per_s_per_gpu[min]:,.2f}–{samples_per_s_per_gpu[max]:,.2f} | ratio {ratio:.3f}"
    " | s/step {step_time_s[median]:.3f} | memory, GB {peak_gb:.2f} | TFLOPS, factor 3 {achieved_tflops:.3f}"
    " | TFLOPS with recomputation, up to 4 {hardware_tflops:.3f} | seconds {seconds:.0f} | state {state} | note {note}"
)


def format_table(rows: Sequence[dict[str, Any]]) -> str:
    """Format rows as a table, with ratios to the first row that has a rate."""
    baseline = None
    lines = []
    for row in rows:
        rate = (row.get("samples_per_s_per_gpu") or {}).get("mean")
        # The first combination may have failed.
        baseline = baseline or rate
        lines.append({**row, "ratio": rate / baseline} if rate else row)
    return table(COLUMNS, lines)


def main(argv: list[str] | None = None) -> int:
    """Run every combination, the last field changing fastest, and save rows and table after each.
    Return 1 if no run completed; UserError if the configuration or an option is wrong."""
    parser = make_parser(__doc__)
    add_config(parser)
    add = parser.add_argument
    vary = "values to try of a field; repeatable"
    add("--vary", action="append", required=True, metavar="FIELD=A,B,…", help=vary)
    add("--folder", type=Path, help="output folder (default: runs/tune/<config>-<time>)")
    add("--limit_s", type=float, default=300.0, help="time limit of a run in s (default: 300)")
    parser.epilog = f"Runs are short ({', '.join(SHORT)}) unless --set overrides this."
    exit_on_sigterm()
    options = parser.parse_args(argv)
    # One list of `FIELD=VALUE` for each field.
    fields = [
        [f"{name}={v if isinstance(v, str) else json.dumps(v)}" for v in values]
        for name, values in map(parse_varied, options.vary)
    ]
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    folder = options.folder or work_folder() / "runs" / "tune" / f"{options.config.stem}-{stamp}"
    # Rows of an earlier call would be overwritten.
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"--folder {folder}: expected a new or empty folder")
    rows: list[dict[str, Any]] = []
    for number, settings in enumerate(itertools.product(*fields), start=1):
        run_folder = folder.resolve() / f"{number:02}"
        print(f"{number}  {', '.join(settings)}, in {run_folder}", flush=True)
        content = changed(options.config, [*SHORT, *options.set, *settings])
        command = [*BENCH, str(run_folder / "config.json")]
        row = run_config(content, command, run_folder, options.limit_s)
        rows.append({"settings": ", ".join(settings), **row})
        # After each run, as the command may be ended at any time.
        show(options.output or folder / "tune.md", format_table(rows), rows)
    return int(all(row["state"] != "completed" for row in rows))


if __name__ == "__main__":
    run_alone(main)
