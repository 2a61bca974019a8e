"""What lines of logs say: one table of dialects, in which programs print their progress, and one of everything else.

A dialect is a pattern. The names of its groups say what each number is:

    step, or samples      done so far; samples of this epoch where there are `epoch` and `epoch_samples`, too
    average               samples/s of all GPUs since the first timed step: cumulative, so that the rate between any two lines
                          is exact, whatever lies between
    step_s, or step_ms    in place of `average`: time of a step, mean since the line before
    rate, rate_of_gpu     samples/s of the last step; they tell the global batch and the number of GPUs, nothing more
    global_batch          samples of a step of all GPUs
    memory_gb             peak memory

DeepSpeed prints `epoch=0/micro_step=50/global_step=50, RunningAvgSamplesPerSec=R, CurrSamplesPerSec=c`, where the timer
begins at step 3. open_clip prints `Train Epoch: 0 [ 616/100000 (1%)] Data (t): 0.012 Batch (t): 0.987, 623.7/s, 623.7/s/gpu`,
earlier without the rate of a GPU; LAION-CLAP without both.

Nothing is anchored to a line's start, so prefixes (pdsh, srun) and merged lines don't matter. A pattern touches a block of
a log only where a faster search has found a text that its lines have (`gate`), and begins with a literal.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

WHOLE = rb"\d{1,15}"
NUMBER = rb"-?(?:\d{1,20}(?:\.\d{0,30})?(?:[eE][+-]?\d{1,3})?|inf|nan)"


@dataclass(frozen=True)
class Dialect:
    """Lines of one program that tell its progress.

    Attributes:
        gate: text that each has once.
        untimed: first steps that the program doesn't time.
        counts_data_wait: whether its times hold the wait for data.
    """

    gate: bytes
    pattern: re.Pattern[bytes]
    untimed: int = 0
    counts_data_wait: bool = True

    @property
    def is_cumulative(self) -> bool:
        return "average" in self.pattern.groupindex

    def columns(self, lines: Sequence[Sequence[bytes]]) -> dict[str, Numbers]:
        """The numbers of lines, each a match's groups, by the groups' names; NaN where a group is empty."""
        texts = np.array(lines)
        texts[texts == b""] = b"nan"
        return dict(zip(self.pattern.groupindex, texts.astype(float).T, strict=True))

    def points(self, columns: dict[str, Numbers]) -> tuple[Numbers, Numbers]:
        """Of each line how far the run is, in a number that only rises, and its average rate or seconds a step."""
        position = columns["step"] if "step" in columns else columns["samples"]
        if "epoch" in columns:
            position = position + columns["epoch"] * columns["epoch_samples"]
        name = next(name for name in ("average", "step_s", "step_ms") if name in columns)
        return position, columns[name] / (1000 if name == "step_ms" else 1)

    def facts(self, columns: dict[str, Numbers]) -> dict[str, int]:
        """What lines say of the run's size, a global batch perhaps only roughly."""
        known = {"global_batch": columns.get("global_batch")}
        if "rate" in columns:
            known = {"global_batch": self.points(columns)[1] * columns["rate"]}
            with np.errstate(divide="ignore", invalid="ignore"):
                known["gpus"] = columns["rate"] / columns["rate_of_gpu"]
        found = {}
        for name, values in known.items():
            if values is not None and len(values := values[np.isfinite(values)]):
                found[name] = round(float(np.median(values)))
        return found

    def curve(self, position: Numbers, value: Numbers, batch: float) -> tuple[Numbers, Numbers, float]:
        """(steps, seconds for each sample of a global batch until that step, global batch or 0 where it isn't known)."""
        if self.is_cumulative:
            return position, (position - self.untimed) / value, batch
        if "samples" in self.pattern.groupindex:
            batch = _exact_batch(position, batch)
            position = position / batch
        return position, np.cumsum(np.diff(position, prepend=0) * value) / (batch or np.nan), batch


def _exact_batch(samples: Numbers, batch: float) -> float:
    """A global batch divides all counts of samples; lines stand after 1, 101, 201, … steps, so nothing larger does."""
    divisor = float(np.gcd.reduce(samples.astype(np.int64)))
    exact = divisor / max(round(divisor / batch), 1) if batch else divisor
    return exact if not batch or 0.6 < exact / batch < 1.6 else batch


DIALECTS = {
    "DeepSpeed": Dialect(
        b"RunningAvgSamplesPerSec=",
        re.compile(
            rb"global_step=(?P<step>%s), RunningAvgSamplesPerSec=(?P<average>%s), CurrSamplesPerSec=%s(?=[,\s])"
            rb"(?:, MemAllocated=[0-9.]{1,20}GB, MaxMemAllocated=(?P<memory_gb>\d{1,9}(?:\.\d{1,9})?)GB)?"
            % (WHOLE, NUMBER, NUMBER)
        ),
        untimed=2,
        counts_data_wait=False,
    ),
    "open_clip and LAION-CLAP": Dialect(
        b"Train Epoch: ",
        re.compile(
            rb"Train Epoch: (?P<epoch>\d{1,6}) \[ *(?P<samples>\d{1,12})/(?P<epoch_samples>\d{1,12}) \(\d+%%\)\] [^\n]{0,400}?"
            rb"Batch \(t\): (?P<step_s>\d{1,9}\.\d{1,9})(?:, (?P<rate>%s)/s(?:, (?P<rate_of_gpu>%s)/s/gpu)?)?(?= )"
            % (NUMBER, NUMBER)
        ),
    ),
}
"""By the programs' names. Another program's lines are one more entry here."""

_DOTS = rb" [ .]*"
_COUNT = rb"(" + WHOLE + rb")\b"
_BAR = rb"\xe2\x94\x82"
_LINES: dict[bytes, dict[str, bytes]] = {
    b"\xc3": {
        "bench_title": rb" on (%s) \xc3\x97 ([^\n]{1,200}?), (%s) nodes?,\s+(\w+),\s+micro-batch\s+(%s),\s+(%s)\s+text\s+tokens"
        % (4 * (WHOLE,)),
    },
    b"\xe2": {
        "bench_figure": _BAR
        + rb" +((?:samples/s|step time, median|95 % interval of|range of)[^\xe2\n]{0,80}?) +"
        + _BAR
        + rb" +((?:[^\xe2\n]|\xe2\x80\x93){1,80}?) +"
        + _BAR,
    },
    b"run directory: ": {"directory": rb"run directory: ([^\n\r\x1b]{0,300})"},
    b"DeepSpeedEngine conf": {"engine": rb"DeepSpeedEngine configuration()"},
    b"num_local_procs=": {"nodes": rb"nnodes=(" + WHOLE + rb"), num_local_procs=\d+"},
    b"dist_world_size=": {"gpus": rb"dist_world_size=" + _COUNT},
    b" ..........": {
        "gpus": rb"world_size(?<![a-z_]world_size)" + _DOTS + _COUNT,
        "global_batch": rb"train_batch_size" + _DOTS + _COUNT,
        "bf16": rb"bfloat16_(?:config|enabled)" + _DOTS + rb"(?:enabled=)?(True|False)",
        "fp16": rb"float16_config(?<!bfloat16_config)" + _DOTS + rb"enabled=(True|False)",
        "torch_autocast": rb"torch_autocast_dtype" + _DOTS + rb"torch\.(\w+)",
    },
    b"gradient_accumulation_steps ": {"accumulation": rb"gradient_accumulation_steps" + _DOTS + _COUNT},
    b"train_micro_batch_size_per_gpu ": {"micro_batch": rb"train_micro_batch_size_per_gpu" + _DOTS + _COUNT},
    b"timers_config ": {"host_alone": rb"timers_config" + _DOTS + rb"enabled=\w+ synchronized=(False)"},
    b"SLURM_": {"nodes": rb"SLURM_(?:JOB_NUM_NODES|NNODES)=" + _COUNT},
    b"|   world_size: ": {"gpus": rb"\|   world_size: " + _COUNT},  # open_clip's and LAION-CLAP's parameters
    b"|   batch_size: ": {"micro_batch": rb"\|   batch_size: " + _COUNT},
    b"|   accum_freq: ": {"accumulation": rb"\|   accum_freq: " + _COUNT},
    b"|   model: ": {"model": rb"\|   model: ([\w-]{1,80})"},
    b"|   precision: ": {"precision": rb"\|   precision: (\w{1,40})"},
    b"OutOfMemoryError": {"out_of_memory": rb"OutOfMemoryError"},
    b"CUDA out of memory": {"out_of_memory": rb"CUDA out of memory"},
    b"CANCELLED AT": {"terminated": rb"CANCELLED AT", "timeout": rb"DUE TO TIME LIMIT"},
    b"process received SIG": {"terminated": rb"Main process received SIG"},
    b"Traceback (most": {"failed": rb"Traceback \(most recent call last\)"},
    b"exits with return": {"failed": rb"exits with return code = -?[1-9]"},
    b"exits successfully": {"completed": rb"exits successfully"},
}
"""Text that must be in a block, and the lines of each kind that may then be in it. Single bytes and long
texts are found fastest."""
_PATTERNS = [(gate, [(kind, re.compile(pattern)) for kind, pattern in lines.items()]) for gate, lines in _LINES.items()]
_BREAKDOWN = re.compile(
    rb"time \(ms\) \| (?:fwd|forward): MS \| (?:bwd|backward): [0-9.]{1,20} \| (?:bwd|backward)_inner: MS "
    rb"\| (?:bwd|backward)_allreduce: MS \| step: MS".replace(b"MS", rb"(\d{1,12}\.\d{2})")
)
_LABEL = re.compile(rb" *(?:\d+|\[\w*?\d+(?:,\d+)?\](?:<\w+>)?|[\w.-]+): ?")
"""What srun --label, mpirun, torchrun and pdsh write before each line."""
_LONGEST_LABEL = 64


def find_lines(block: bytes) -> list[tuple[int, str, re.Match[bytes]]]:
    """What a block says beside progress: (where, kind, match), in the order it stands."""
    found = []
    for gate, lines in _PATTERNS:
        if gate in block:
            found += [(match.start(), kind, match) for kind, pattern in lines for match in pattern.finditer(block)]
    return sorted(found, key=itemgetter(0))


def find_breakdown(block: bytes) -> list[tuple[bytes, ...]]:
    """Milliseconds of forward, backward, all-reduce and optimiser, by DeepSpeed's `wall_clock_breakdown`, of each step."""
    return _BREAKDOWN.findall(block) if b"time (ms) |" in block else []


def label_of(match: re.Match[bytes]) -> bytes | None:
    """What stands before DeepSpeed's time stamp in a match's line: which rank's or host's it is. None if that can't be told."""
    block, start = match.string, match.start()
    begin = block.rfind(b"\n", 0, start) + 1
    if block.startswith(b"[20", begin):
        return b""
    label, stamp, _ = block[begin : min(begin + _LONGEST_LABEL, start)].partition(b"[20")
    label = label.rpartition(b"\r")[2]
    return label.strip() if stamp and _LABEL.fullmatch(label) else None
