"""Formats of log lines: one table of progress lines by program, and one of all other lines.

The group names of a format's pattern define its numbers:

    step, or samples      done so far; samples count from the epoch's start if there are `epoch` and `epoch_samples`
    average               samples/s of all GPUs since the first timed step: cumulative, so the rate between any two lines
                          is exact
    rate                  instead of `average`: samples/s of all GPUs since the previous line
    step_s, or step_ms    instead of `average`: mean time per step since the previous line
    global_batch, gpus    samples per step over all GPUs; number of GPUs. An entry of `_LINES` would begin a new start
    memory_gib            peak memory of a GPU so far

Patterns are not anchored to a line's start, so prefixes (pdsh, srun) don't matter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from clap_ds.config.model_names import preset_names

NUMBER = r"(?:\d{1,20}(?:\.\d{0,30})?(?:[eE][+-]?\d{1,3})?)"


@dataclass(frozen=True)
class Dialect:
    """Progress lines of one program. Each contains the text `gate`; the first `untimed` steps are not timed."""

    gate: str
    pattern: re.Pattern[str]
    untimed: int = 0
    counts_data_wait: bool = True

    @property
    def is_cumulative(self) -> bool:
        return "average" in self.pattern.groupindex

    @property
    def states_rate(self) -> bool:
        return not self.pattern.groupindex.keys().isdisjoint(("average", "rate"))

    def numbers(self, line: str) -> Iterator[dict[str, float]]:
        for match in self.pattern.finditer(line) if self.gate in line else ():
            yield {name: float(text) for name, text in match.groupdict().items() if text}


DIALECTS = {
    # global_step=50, RunningAvgSamplesPerSec=R, CurrSamplesPerSec=c, MemAllocated=1GB, MaxMemAllocated=1GB
    "DeepSpeed": Dialect(
        "RunningAvgSamplesPerSec=",
        re.compile(
            rf"global_step=(?P<step>\d{{1,15}}), RunningAvgSamplesPerSec=(?P<average>{NUMBER}), CurrSamplesPerSec={NUMBER}"
            rf"(?=[,\s])(?:, MemAllocated={NUMBER}GB, MaxMemAllocated=(?P<memory_gib>{NUMBER})GB)?"
        ),
        untimed=2,
        counts_data_wait=False,
    ),
    # Train Epoch: 0 [ 616/100000 (1%)] Data (t): 0.012 Batch (t): 0.987, 623.7/s, 623.7/s/gpu (LAION-CLAP ends after the time)
    "open_clip and LAION-CLAP": Dialect(
        "Train Epoch: ",
        re.compile(
            r"Train Epoch: (?P<epoch>\d{1,6}) \[ *(?P<samples>\d{1,12})/(?P<epoch_samples>\d{1,12}) \(\d+%\)\] .{0,400}?"
            r"Batch \(t\): (?P<step_s>\d{1,9}\.\d{1,9})(?=[ ,])"
        ),
    ),
}
"""Formats by program. To support another program, add an entry."""

_DOTS = r" [ .]*"
_COUNT = r"(\d{1,15})\b"
_LINES: dict[str, dict[str, str]] = {
    "run directory: ": {"directory": r"run directory: ([^\n\r\x1b]{1,300})"},
    "ranks: ": {"gpus": r"\branks: (\d{1,15}), nodes: \d", "nodes": r"\branks: \d{1,15}, nodes: (\d{1,15})\b"},
    "num_local_procs=": {"nodes": r"nnodes=(\d{1,15}), num_local_procs=\d+"},
    "dist_world_size=": {"gpus": r"dist_world_size=" + _COUNT},
    " ...": {
        "gpus": r"(?<![a-z_])world_size" + _DOTS + _COUNT,
        "global_batch": r"train_batch_size" + _DOTS + _COUNT,
        "precision": r"\b(b?float16)_(?:config|enabled)" + _DOTS + r"(?:enabled=)?True",
    },
    "gradient_accumulation_steps ": {"accumulation": r"gradient_accumulation_steps" + _DOTS + _COUNT},
    "train_micro_batch_size_per_gpu ": {"micro_batch": r"train_micro_batch_size_per_gpu" + _DOTS + _COUNT},
    " |   ": {  # open_clip's and LAION-CLAP's parameters
        "gpus": r"\|   world_size: " + _COUNT,
        "micro_batch": r"\|   batch_size: " + _COUNT,
        "accumulation": r"\|   accum_freq: " + _COUNT,
        "model": r"\|   model: ([\w-]{1,80})",
        "precision": r"\|   precision: (\w{1,40})",
    },
    "OutOfMemoryError": {"out_of_memory": r"OutOfMemoryError"},
    " out of memory": {"out_of_memory": r"CUDA out of memory"},
    "CANCELLED AT": {"timeout": r"CANCELLED AT.*DUE TO TIME LIMIT", "terminated": r"CANCELLED AT"},
    "process received SIG": {"terminated": r"Main process received SIG"},
    "Traceback (most": {"failed": r"Traceback \(most recent call last\)"},
    "exits with return": {"failed": r"exits with return code = -?[1-9]"},
    "exits successfully": {"completed": r"exits successfully"},
}
"""Patterns by a text that the line must contain: searching for the text first is much faster."""
_PATTERNS = [(gate, [(kind, re.compile(pattern)) for kind, pattern in lines.items()]) for gate, lines in _LINES.items()]


_TITLE = re.compile(
    r"(?P<model>[\w:.-]{1,80}) on (?P<gpus>\d{1,15}) × (?P<device>.{1,200}?), (?P<nodes>\d{1,15}) nodes?,"
    r" (?P<precision>\w{1,40}), micro-batch (?P<micro_batch>\d{1,15})(?:, accumulation (?P<accumulation>\d{1,15}))?,"
    r" (?P<context_length>\d{1,15}) text tokens"
)
"""`run_title` in `clap_ds/run_records/terminal.py`."""


def title_in(line: str) -> dict[str, str]:
    """Return what this project's title states, by kind. It stands before a run's steps and above its results, so unlike other
    facts it begins no new start."""
    match = _TITLE.search(line) if " text tokens" in line else None
    if match is None:
        return {}
    facts = match.groupdict(default="1")
    # In merged lines, another line's end may stand before the name.
    presets = [name for name in preset_names() if facts["model"].endswith(name)]
    facts["model"] = max(presets, key=len, default=facts["model"])
    return facts


def facts_in(line: str) -> Iterator[tuple[str, str]]:
    """Yield the facts of a line other than progress: (kind, text)."""
    for gate, patterns in _PATTERNS:
        for kind, pattern in patterns if gate in line else ():
            for match in pattern.finditer(line):
                yield kind, match[1] if match.lastindex else ""
