"""The lines of a log that say something, as every DeepSpeed from 0.3 to 0.19, this project's benchmark and SLURM print them.

DeepSpeed's throughput: `0/50, SamplesPerSec=R` of micro-steps (to 0.6), `0/50, RunningAvgSamplesPerSec=R, CurrSamplesPerSec=c`
of micro-steps (0.7), `epoch=0/micro_step=50/global_step=50, RunningAvg…` of steps (from 0.8), and of its pipeline engine
`steps: 50 loss: … samples/sec: R`, the mean since its last line. Its breakdown: `time (ms) | forward: …`, later `| fwd: …`.

Nothing is anchored to a line's start, so prefixes (pdsh, srun) and merged lines don't matter. A regular expression touches a
block only where a faster search has found a text that its lines have, and begins with a literal, by which it is quick itself.
"""

from __future__ import annotations

import re
from operator import itemgetter

Lines = dict[str, list["re.Match[bytes]"]]
"""Matches by kind, in the order they stand."""

_ANY_NUMBER = rb"-?(?:\d{1,20}(?:\.\d{0,30})?(?:[eE][+-]?\d{1,4})?|inf|nan)"
_NUMBER = rb"(" + _ANY_NUMBER + rb")"
_WHOLE = rb"(\d{1,15})"
_MEMORY = rb"(?:, MemAllocated=[0-9.]{1,20}GB, MaxMemAllocated=(\d{1,9}(?:\.\d{1,9})?)GB)?"
_CURRENT = rb", CurrSamplesPerSec="
_DOTS = rb" [ .]*"
_BAR = rb"\xe2\x94\x82"
_MS = rb"(\d{1,12}\.\d{2})"
_LINES: dict[bytes, dict[str, bytes]] = {
    b"samples/s": {
        "pipeline": rb"steps: " + _WHOLE + rb" loss: [^\n]{0,400}? samples/sec: " + _NUMBER + rb"(?=[,\s])",
        "bench_window": rb"window " + _WHOLE + rb"/\d+: ([\d,]{1,20}\.\d) samples/s",
    },
    b"\xc3": {
        "bench_title": rb" on " + _WHOLE + rb" \xc3\x97 ([^\n]{1,200}?), " + _WHOLE + rb" nodes?,\s+(\w+),\s+micro-batch\s+"
        + _WHOLE + rb",\s+" + _WHOLE + rb"\s+text\s+tokens",
    },
    b"\xe2": {
        "bench_figure": _BAR + rb" +(\w[^\xe2\n]{2,80}?) +" + _BAR + rb" +((?:[^\xe2\n]|\xe2\x80\x93){1,80}?) +" + _BAR,
    },
    b"time (ms) |": {
        "breakdown": rb"time \(ms\) \| (?:fwd|forward): " + _MS + rb" \| (?:bwd|backward): [0-9.]{1,20} \| (?:bwd|backward)"
        rb"_inner: " + _MS + rb" \| (?:bwd|backward)_allreduce: " + _MS + rb" \| step: " + _MS,
    },
    b"run directory: ": {"start": rb"run directory: ()"},
    b"DeepSpeedEngine conf": {"engine": rb"DeepSpeedEngine configuration()"},
    b"num_local_procs=": {"nodes": rb"nnodes=" + _WHOLE + rb", num_local_procs=\d+"},
    b"dist_world_size=": {"gpus": rb"dist_world_size=" + _WHOLE + rb"\b"},
    b" ..........": {
        "gpus": rb"world_size(?<![a-z_]world_size)" + _DOTS + _WHOLE + rb"\b",
        "global_batch": rb"train_batch_size" + _DOTS + _WHOLE + rb"\b",
        "bf16": rb"bfloat16_(?:config|enabled)" + _DOTS + rb"(?:enabled=)?(True|False)",
        "fp16": rb"float16_config(?<!bfloat16_config)" + _DOTS + rb"enabled=(True|False)",
        "fp16 of old": rb"fp16_enabled" + _DOTS + rb"(True|False)",
        "autocast": rb"torch_autocast_dtype" + _DOTS + rb"torch\.(\w+)",
    },
    b"gradient_accumulation_steps ": {"accumulation": rb"gradient_accumulation_steps" + _DOTS + _WHOLE + rb"\b"},
    b"train_micro_batch_size_per_gpu ": {"micro_batch": rb"train_micro_batch_size_per_gpu" + _DOTS + _WHOLE + rb"\b"},
    b"OutOfMemoryError": {"out_of_memory": rb"OutOfMemoryError"},
    b"CUDA out of memory": {"out_of_memory": rb"CUDA out of memory"},
    b"CANCELLED AT": {"terminated": rb"CANCELLED AT", "timeout": rb"DUE TO TIME LIMIT"},
    b"process received SIG": {"terminated": rb"Main process received SIG"},
    b"Traceback (most": {"failed": rb"Traceback \(most recent call last\)"},
    b"exits with return": {"failed": rb"exits with return code = -?[1-9]"},
    b"exits successfully": {"completed": rb"exits successfully"},
}  # fmt: skip
"""Text that must be in a block, and the lines of each kind (first word) that may then be in it. Single bytes and long
texts are found fastest."""
_PATTERNS = [
    (gate, [(kind.split()[0], re.compile(pattern)) for kind, pattern in lines.items()])
    for gate, lines in _LINES.items()
]
_THROUGHPUT = re.compile(
    rb"global_step="
    + _WHOLE
    + rb", RunningAvgSamplesPerSec="
    + _NUMBER
    + _CURRENT
    + _ANY_NUMBER
    + rb"(?=[,\s])"
    + _MEMORY
)
_MICRO_THROUGHPUT = re.compile(
    rb"/" + _WHOLE + rb", (?:RunningAvg(?=SamplesPerSec=" + _ANY_NUMBER + _CURRENT + rb"))?SamplesPerSec=" + _NUMBER
    + rb"(?:" + _CURRENT + _ANY_NUMBER + rb")?(?=[,\s])" + _MEMORY
)  # fmt: skip
_ANSI = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
_LABEL = re.compile(rb" *(?:\d+|\[\w*?\d+(?:,\d+)?\](?:<\w+>)?|[\w.-]+): ?")
"""What srun --label, mpirun, torchrun and pdsh write before each line."""
LONGEST_LABEL = 64
_WORD = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-"


def without_colours(block: bytes) -> bytes:
    return _ANSI.sub(b"", block) if b"\x1b" in block else block


def find_lines(block: bytes) -> tuple[Lines, int]:
    """The lines of a block, and how many of throughput are cut or overwritten by another's."""
    found: Lines = {}
    damaged = 0
    if b"SamplesPerSec=" in block:
        is_new = b"global_step=" in block
        kind, pattern = ("throughput", _THROUGHPUT) if is_new else ("micro_throughput", _MICRO_THROUGHPUT)
        found[kind] = list(pattern.finditer(block))
        damaged = block.count(b"SamplesPerSec=") - block.count(b"CurrSamplesPerSec=") - len(found[kind])
    for gate, lines in _PATTERNS:
        if gate in block:
            for kind, pattern in lines:
                if matches := list(pattern.finditer(block)):
                    found.setdefault(kind, []).extend(matches)
    return found, max(damaged, 0)


def in_order(lines: Lines) -> list[tuple[str, re.Match[bytes]]]:
    """(kind, match) as they stand in their block."""
    every = [(match.start(), kind, match) for kind, matches in lines.items() for match in matches]
    return [line[1:] for line in sorted(every, key=itemgetter(0))]


def label_of(match: re.Match[bytes]) -> bytes | None:
    """What stands before DeepSpeed's time stamp in a match's line: which rank's or host's it is. None if that can't be told."""
    block, start = match.string, match.start()
    begin = block.rfind(b"\n", 0, start) + 1
    if block.startswith(b"[20", begin):
        return b""
    label, stamp, _ = block[begin : min(begin + LONGEST_LABEL, start)].partition(b"[20")
    label = label.rpartition(b"\r")[2]
    return label.strip() if stamp and _LABEL.fullmatch(label) else None


def model_before(match: re.Match[bytes]) -> str:
    """The last word before a match, without a label."""
    before = match.string[max(0, match.start() - 100) : match.start()]
    return before[len(before.rstrip(_WORD)) :].decode()
