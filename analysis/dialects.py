"""What lines of logs say: one table of dialects, in which programs print their progress, and one of everything else.

A dialect is a pattern. The names of its groups say what each number is:

    step, or samples      done so far; samples of this epoch where there are `epoch` and `epoch_samples`, too
    average               samples/s of all GPUs since the first timed step: cumulative, so that the rate between any two lines
                          is exact, whatever lies between
    step_s, or step_ms    in place of `average`: time of a step, mean since the line before
    global_batch          samples of a step of all GPUs

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
        texts = np.array(lines).reshape(len(lines), -1)
        texts[texts == b""] = b"nan"
        return dict(zip(self.pattern.groupindex, texts.astype(float).T, strict=True))

    def points(self, columns: dict[str, Numbers]) -> tuple[Numbers, Numbers]:
        """Of each line how far the run is, in a number that only rises, and its average rate or seconds a step."""
        position = columns["step"] if "step" in columns else columns["samples"]
        if "epoch" in columns:
            position = position + columns["epoch"] * columns["epoch_samples"]
        name = next(name for name in ("average", "step_s", "step_ms") if name in columns)
        return position, columns[name] / (1000 if name == "step_ms" else 1)

    def times(self, position: Numbers, value: Numbers, batch: float) -> tuple[Numbers, Numbers]:
        """(steps, seconds from the first timed step until each); `batch` is the global one, 1 for seconds of one sample."""
        if self.is_cumulative:
            return position, batch * (position - self.untimed) / value
        steps = position / batch if "samples" in self.pattern.groupindex else position
        return steps, np.cumsum(np.diff(steps, prepend=0) * value)


DIALECTS = {
    # epoch=0/micro_step=50/global_step=50, RunningAvgSamplesPerSec=R, CurrSamplesPerSec=c: the timer begins at step 3.
    "DeepSpeed": Dialect(
        b"RunningAvgSamplesPerSec=",
        re.compile(
            rb"global_step=(?P<step>%s), RunningAvgSamplesPerSec=(?P<average>%s), CurrSamplesPerSec=%s(?=[,\s])"
            % (WHOLE, NUMBER, NUMBER)
        ),
        untimed=2,
        counts_data_wait=False,
    ),
    # Train Epoch: 0 [ 616/100000 (1%)] Data (t): 0.012 Batch (t): 0.987, 623.7/s, 623.7/s/gpu; LAION-CLAP's end after the time.
    "open_clip and LAION-CLAP": Dialect(
        b"Train Epoch: ",
        re.compile(
            rb"Train Epoch: (?P<epoch>\d{1,6}) \[ *(?P<samples>\d{1,12})/(?P<epoch_samples>\d{1,12}) \(\d+%\)\] [^\n]{0,400}?"
            rb"Batch \(t\): (?P<step_s>\d{1,9}\.\d{1,9})(?=[ ,])"
        ),
    ),
}
"""By the programs' names. Another program's lines are one more entry here."""

_DOTS = rb" [ .]*"
_COUNT = rb"(" + WHOLE + rb")\b"
_LINES: dict[bytes, dict[str, bytes]] = {
    b"run directory: ": {"directory": rb"run directory: ([^\n\r\x1b]{1,300})"},
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
    b" |   ": {  # open_clip's and LAION-CLAP's parameters
        "gpus": rb"\|   world_size: " + _COUNT,
        "micro_batch": rb"\|   batch_size: " + _COUNT,
        "accumulation": rb"\|   accum_freq: " + _COUNT,
        "model": rb"\|   model: ([\w-]{1,80})",
        "precision": rb"\|   precision: (\w{1,40})",
    },
    b"OutOfMemoryError": {"out_of_memory": rb"OutOfMemoryError"},
    b" out of memory": {"out_of_memory": rb"CUDA out of memory"},
    b"CANCELLED AT": {"terminated": rb"CANCELLED AT", "timeout": rb"DUE TO TIME LIMIT"},
    b"process received SIG": {"terminated": rb"Main process received SIG"},
    b"Traceback (most": {"failed": rb"Traceback \(most recent call last\)"},
    b"exits with return": {"failed": rb"exits with return code = -?[1-9]"},
    b"exits successfully": {"completed": rb"exits successfully"},
}
"""Text that must be in a block, and the lines of each kind that may then be in it: a search for it costs far less."""
_PATTERNS = [(gate, [(kind, re.compile(pattern)) for kind, pattern in lines.items()]) for gate, lines in _LINES.items()]


def find_lines(block: bytes) -> list[tuple[int, str, str]]:
    """What a block says beside progress: (where, kind, the word that the line tells), in the order it stands."""
    found = []
    for gate, lines in _PATTERNS:
        for kind, pattern in lines if gate in block else ():
            for match in pattern.finditer(block):
                found.append((match.start(), kind, (match[1] if match.lastindex else b"").decode(errors="replace")))
    return sorted(found, key=itemgetter(0))
