"""Command: how long training stands still for a checkpoint, and how fast it is while one is being written behind it.

    python -m benchmarks.save_stall --output results/cpu/save_stall/save_stall.md

HTSAT-tiny on two CPU ranks, with and without `clap.checkpoint.background`, in turns. What stands still is what lies between two
steps, whatever it was for; rates are of the steps while a checkpoint was being written and of those after it, until the next.
"""

import json
import tempfile
from functools import partial
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
    "checkpoints written {how} | of them {saves} | rank 0's memory, GB {memory_gb:.1f}"
    " | training stands still, s {stall_s.median:.2f} ({stall_s.low:.2f}–{stall_s.high:.2f})"
    " | until it is on the disk, s {written_s.median:.1f} ({written_s.low:.1f}–{written_s.high:.1f})"
    " | a step otherwise, s {free_s.median:.2f} | rate meanwhile {rate.median:.0%} ({rate.low:.0%}–{rate.high:.0%})"
)
Lines = list[dict[str, Any]]


def history_of(*, background: bool, every_steps: int, saves: int) -> Lines:
    """What a run has left that saves so often, and once more at its end."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = json.loads((PACKAGE / "ds_configs" / "htsat_tiny_cpu.json").read_text())
        run["train_micro_batch_size_per_gpu"] = 1
        checkpoint = {"every_steps": every_steps, "keep_last": 1, "background": background, "folder": f"{folder}/saved"}
        train = {"samples": 2 * every_steps * (saves + 1), "log_every_steps": 1}
        run["clap"] |= {"train": train, "checkpoint": checkpoint, "output": {"root": f"{folder}/runs"}}
        (config := folder / "run.json").write_text(json.dumps(run))
        with training(config, 2) as ranks:
            if any(rank.wait() for rank in ranks):
                raise UserError((folder / "output").read_text())
        return [json.loads(line) for line in (folder / "saved" / "history.jsonl").read_text().splitlines()]


def saves_in(history: Lines) -> Lines:
    """Of each checkpoint but the one at the end: seconds that training stood still, seconds until it was on the disk, seconds a
    step from then to the next one and, where there were steps before, the rate of those as a fraction of the rate then."""
    steps, found = [line for line in history if line["phase"] == "train"], []
    for save, following in pairwise(line for line in history if line["phase"] == "checkpoint"):
        last, first, *_ = own = steps[save["step"] - 1 : following["step"]]
        stall_s = first["train_s"] - first["time_s"] - last["train_s"]
        meanwhile = [line["time_s"] for line in own[1:] if line["train_s"] < save["train_s"]]
        after = [line["time_s"] for line in own[1 + len(meanwhile) :]]
        rate = {"rate": mean(after) / mean(meanwhile)} if meanwhile else {}
        found.append({"stall_s": stall_s, "written_s": save["seconds"], "free_s": mean(after), **rate})
    return found


def row(how: str, histories: list[Lines]) -> dict[str, Any]:
    saves = [save for history in histories for save in saves_in(history)]
    memory = max(line["memory_bytes"] for history in histories for line in history if line["phase"] == "train")
    medians = {name: median_interval([save[name] for save in saves]) for name in saves[0]}
    return {"how": how, "saves": len(saves), "memory_peak_bytes": memory, **medians}


def main(argv: list[str] | None = None) -> None:
    parser = make_parser("save_stall", __doc__)
    parser.add_argument("--saves", type=whole_number(), default=4, metavar="N", help="checkpoints of a run (default 4)")
    parser.add_argument("--rounds", type=whole_number(), default=2, metavar="N", help="runs of either kind (default 2)")
    options = parser.parse_args(argv)
    exit_on_sigterm()
    behind = partial(history_of, background=True, every_steps=64, saves=options.saves)
    still = partial(history_of, background=False, every_steps=4, saves=options.saves)
    found = in_turns({"behind training": behind, "while it stands still": still}, options.rounds)
    rows = [row(how, histories) for how, histories in found.items()]
    share = rows[0]["stall_s"].median / rows[1]["stall_s"].median
    text = f"{table(COLUMNS, rows)}\n\nBehind training it stands still for {share:.1%} of the time without."
    show(options.output, text, found)


if __name__ == "__main__":
    run_alone(main)
