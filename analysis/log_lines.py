"""The lines of a log that say something: launchers', engines', the benchmark's and SLURM's; rates are `dialects.py`'s.

Nothing is anchored to a line's start, so prefixes (pdsh, srun) and merged lines don't matter. A regular expression touches a
block only where a faster search has found a text that its lines have, and begins with a literal, by which it is quick itself.
"""

from __future__ import annotations

import re
from operator import itemgetter

from clap_ds.analysis.dialects import DIALECTS, WHOLE, Dialect

Matches = list["re.Match[bytes]"]

_DOTS = rb" [ .]*"
_BAR = rb"\xe2\x94\x82"
_LINES: dict[bytes, dict[str, bytes]] = {
    b"samples/s": {"bench_window": rb"window " + WHOLE + rb"/\d+: ([\d,]{1,20}\.\d) samples/s"},
    b"\xc3": {
        "bench_title": rb" on " + WHOLE + rb" \xc3\x97 ([^\n]{1,200}?), " + WHOLE + rb" nodes?,\s+(\w+),\s+micro-batch\s+"
        + WHOLE + rb",\s+" + WHOLE + rb"\s+text\s+tokens",
    },
    b"\xe2": {
        "bench_figure": _BAR + rb" +(\w[^\xe2\n]{2,80}?) +" + _BAR + rb" +((?:[^\xe2\n]|\xe2\x80\x93){1,80}?) +" + _BAR,
    },
    b"run directory: ": {"start": rb"run directory: ([^\n\r\x1b]{0,300})"},
    b"DeepSpeedEngine conf": {"engine": rb"DeepSpeedEngine configuration()"},
    b"num_local_procs=": {"nodes": rb"nnodes=" + WHOLE + rb", num_local_procs=\d+"},
    b"dist_world_size=": {"gpus": rb"dist_world_size=" + WHOLE + rb"\b"},
    b" ..........": {
        "gpus": rb"world_size(?<![a-z_]world_size)" + _DOTS + WHOLE + rb"\b",
        "global_batch": rb"train_batch_size" + _DOTS + WHOLE + rb"\b",
        "bf16": rb"bfloat16_(?:config|enabled)" + _DOTS + rb"(?:enabled=)?(True|False)",
        "fp16": rb"float16_config(?<!bfloat16_config)" + _DOTS + rb"enabled=(True|False)",
        "autocast": rb"torch_autocast_dtype" + _DOTS + rb"torch\.(\w+)",
    },
    b"gradient_accumulation_steps ": {"accumulation": rb"gradient_accumulation_steps" + _DOTS + WHOLE + rb"\b"},
    b"train_micro_batch_size_per_gpu ": {"micro_batch": rb"train_micro_batch_size_per_gpu" + _DOTS + WHOLE + rb"\b"},
    b"timers_config ": {"host_alone": rb"timers_config" + _DOTS + rb"enabled=\w+ synchronized=(False)"},
    b"SLURM_": {"nodes": rb"SLURM_(?:JOB_NUM_NODES|NNODES)=" + WHOLE + rb"\b"},
    b"|   world_size: ": {"gpus": rb"\|   world_size: " + WHOLE + rb"\b"},  # open_clip's and LAION-CLAP's parameters
    b"|   batch_size: ": {"micro_batch": rb"\|   batch_size: " + WHOLE + rb"\b"},
    b"|   accum_freq: ": {"accumulation": rb"\|   accum_freq: " + WHOLE + rb"\b"},
    b"|   model: ": {"model": rb"\|   model: ([\w-]{1,80})"},
    b"|   precision: ": {"precision": rb"\|   precision: (\w{1,40})"},
    b"OutOfMemoryError": {"out_of_memory": rb"OutOfMemoryError"},
    b"CUDA out of memory": {"out_of_memory": rb"CUDA out of memory"},
    b"CANCELLED AT": {"terminated": rb"CANCELLED AT", "timeout": rb"DUE TO TIME LIMIT"},
    b"process received SIG": {"terminated": rb"Main process received SIG"},
    b"Traceback (most": {"failed": rb"Traceback \(most recent call last\)"},
    b"exits with return": {"failed": rb"exits with return code = -?[1-9]"},
    b"exits successfully": {"completed": rb"exits successfully"},
}  # fmt: skip
"""Text that must be in a block, and the lines of each kind that may then be in it. Single bytes and long
texts are found fastest."""
_PATTERNS = [(gate, [(kind, re.compile(pattern)) for kind, pattern in lines.items()]) for gate, lines in _LINES.items()]
_PARTS = re.compile(
    rb"time \(ms\) \| (?:fwd|forward): MS \| (?:bwd|backward): [0-9.]{1,20} \| (?:bwd|backward)_inner: MS "
    rb"\| (?:bwd|backward)_allreduce: MS \| step: MS".replace(b"MS", rb"(\d{1,12}\.\d{2})")
)
_ANSI = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
_LABEL = re.compile(rb" *(?:\d+|\[\w*?\d+(?:,\d+)?\](?:<\w+>)?|[\w.-]+): ?")
"""What srun --label, mpirun, torchrun and pdsh write before each line."""
LONGEST_LABEL = 64


def without_colours(block: bytes) -> bytes:
    return _ANSI.sub(b"", block) if b"\x1b" in block else block


def find_lines(block: bytes) -> list[tuple[str, re.Match[bytes]]]:
    """What a block says, (kind, match), in the order it stands."""
    found: list[tuple[int, str, re.Match[bytes]]] = []
    for gate, lines in _PATTERNS:
        if gate in block:
            found += [(match.start(), kind, match) for kind, pattern in lines for match in pattern.finditer(block)]
    return [line[1:] for line in sorted(found, key=itemgetter(0))]


def find_rates(block: bytes) -> tuple[Dialect, Matches, int] | None:
    """The lines of a block that tell rates, in which dialect, and how many are cut or overwritten by another's."""
    for dialect in DIALECTS:
        if dialect.gate in block and (matches := list(dialect.pattern.finditer(block))):
            return dialect, matches, max(block.count(dialect.gate) - len(matches), 0)
    return None


def find_parts(block: bytes) -> Matches:
    """The lines of `wall_clock_breakdown` that tell a whole step's parts: ms of forward, backward, all-reduce and optimiser."""
    return list(_PARTS.finditer(block)) if b"time (ms) |" in block else []


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
    return (re.findall(rb"[\w.-]+$", before) or [b""])[0].decode()
