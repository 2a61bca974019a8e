"""Command: how long training stands still for a checkpoint, and how fast it is while one is being written behind it.

    python -m benchmarks.save_stall --output results/cpu/save_stall/save_stall.md

HTSAT-tiny on two CPU ranks by the command users type, with and without `clap.checkpoint.background`, in turns. What stood
still is what lies between two steps, whatever it was for; the rate is of the steps while a checkpoint was being written and of
those after it, until the next.
"""

from __future__ import annotations

import json
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.common import exit_on_sigterm, in_turns, make_parser, show, table
from benchmarks.endurance import training
from clap_ds.config.arguments import whole_number
from clap_ds.config.errors import UserError, run_alone
from clap_ds.config.places import PACKAGE
from clap_ds.record.statistics import median_interval

COLUMNS = (
    "checkpoints written {how} | of them {saves} | MB each {megabytes:,.0f} | rank 0's memory, GB {memory_gb:.1f}"
    " | training stands still, s {stall_s.median:.2f} ({stall_s.low:.2f}–{stall_s.high:.2f})"
    " | until it is on the disk, s {written_s.median:.1f} ({written_s.low:.1f}–{written_s.high:.1f})"
    " | a step otherwise, s {free_s.median:.2f} | rate meanwhile {rate.median:.0%} ({rate.low:.0%}–{rate.high:.0%})"
)
Lines = list[dict[str, Any]]


def history_of(*, background: bool, every_steps: int, saves: int, micro_batch: int) -> Lines:
    """What a run has left that saves so often, and once more at its end."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = json.loads((PACKAGE / "ds_configs" / "htsat_tiny_cpu.json").read_text())
        run["train_micro_batch_size_per_gpu"] = micro_batch
        checkpoint = {"every_steps": every_steps, "keep_last": 1, "background": background, "folder": f"{folder}/saved"}
        train = {"samples": 2 * micro_batch * every_steps * (saves + 1), "log_every_steps": 1}
        run["clap"] |= {"train": train, "checkpoint": checkpoint, "output": {"root": f"{folder}/runs"}}
        (config := folder / "run.json").write_text(json.dumps(run))
        with training(config, 2) as ranks:
            if any(rank.wait() for rank in ranks):
                raise UserError((folder / "output").read_text())
        return [json.loads(line) for line in (folder / "saved" / "history.jsonl").read_text().splitlines()]


def saves_in(history: Lines) -> Lines:
    """Of each checkpoint but the one at the end: seconds that training stood still, seconds until it was on the disk, bytes,
    seconds a step after that, until the next, and the rate before that as a fraction of the rate after."""
    written = {line["step"]: line for line in history if line["phase"] == "checkpoint" and line["saved"]}
    found, steps = Lines(), dict[int, tuple[list[float], list[float]]]()
    for before, line in pairwise(line for line in history if line["phase"] == "train"):
        if save := written.get(before["step"]):
            stall_s = line["train_s"] - line["time_s"] - before["train_s"]
            found.append(
                {"step": save["step"], "stall_s": stall_s, "written_s": save["seconds"], "bytes": save["bytes"]}
            )
            steps[save["step"]] = [], []
        if found:
            last = found[-1]["step"]
            steps[last][line["train_s"] > written[last]["train_s"]].append(line["time_s"])
    for each in found:
        meanwhile, after = steps[each["step"]]
        each |= {"free_s": mean(after)} if after else {}
        each |= {"rate": mean(after) / mean(meanwhile)} if meanwhile and after else {}
    return found


def row(how: str, histories: list[Lines]) -> dict[str, Any]:
    saves = [save for history in histories for save in saves_in(history)]
    memory = max(line["memory_bytes"] for history in histories for line in history if line["phase"] == "train")
    values = {
        name: [each[name] for each in saves if name in each] for name in ("stall_s", "written_s", "free_s", "rate")
    }
    medians = {name: median_interval(found) for name, found in values.items() if found}
    return {
        "how": how,
        "saves": len(saves),
        "megabytes": saves[0]["bytes"] / 1e6,
        "memory_peak_bytes": memory,
        **medians,
    }


def main(argv: list[str] | None = None) -> None:
    parser = make_parser("save_stall", __doc__)
    parser.add_argument("--saves", type=whole_number(), default=4, metavar="N", help="checkpoints of a run (default 4)")
    parser.add_argument("--every_steps", type=whole_number(2), default=64, metavar="N", help="default 64; 4 without")
    parser.add_argument("--micro_batch", type=whole_number(), default=1, metavar="N", help="default 1")
    parser.add_argument("--rounds", type=whole_number(), default=2, metavar="N", help="runs of either kind (default 2)")
    options = parser.parse_args(argv)
    exit_on_sigterm()
    common = {"saves": options.saves, "micro_batch": options.micro_batch}
    found = in_turns(
        {
            "behind training": lambda: history_of(background=True, every_steps=options.every_steps, **common),
            "while it stands still": lambda: history_of(background=False, every_steps=4, **common),
        },
        options.rounds,
    )
    rows = [row(how, histories) for how, histories in found.items()]
    stall = rows[0]["stall_s"].median / rows[1]["stall_s"].median
    text = f"{table(COLUMNS, rows)}\n\nBehind training it stands still for {stall:.1%} of the time without."
    show(options.output, text, found)


if __name__ == "__main__":
    run_alone(main)
