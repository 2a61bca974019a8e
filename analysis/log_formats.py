"""Formats of log lines: one table of progress lines by program, and one of all other lines.

The group names of a format's pattern define its numbers:

    step, or samples      done so far, since the epoch's start if there is `epoch` average
    samples/s of all GPUs since the first timed step: cumulative, so the rate between any two lines
                          is exact
    rate                  instead of `average`: samples/s of all GPUs since the previous line
    gpu_tokens            instead of `average`: tokens/s of one GPU since the previous line step_s,
    or step_ms    instead of `average`: mean time per step since the previous line elapsed
    instead of `average`: time since the start, or the epoch's start: seconds, or 1:02:03
    global_batch, gpus    samples per step over all GPUs; number of GPUs. An entry of `_LINES` would
    begin a new start memory_gib            peak memory of a GPU so far

Lines without a position are one step each, or with `rate` and `elapsed` a summary of the whole run.
Patterns are not anchored to a line's start, so prefixes (pdsh, srun) don't matter. Their repeats
are bounded: a search of a long line that repeats a pattern's beginning would take quadratic time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from clap_ds.config.model_names import preset_names

VALUES = ("average", "rate", "gpu_tokens", "step_s", "step_ms", "elapsed")
NUMBER = r"(?:\d{1,20}(?:\.\d{0,30})?(?:[eE][+-]?\d{1,3})?)"


@dataclass(frozen=True)
class Dialect:
    """Progress lines of one program. Each contains the text `gate`; the first `untimed` steps are
    not timed."""

    gate: str
    pattern: str | re.Pattern[str]
    untimed: int = 0
    counts_data_wait: bool = True
    most_rounding: float = 1.0
    """Upper limit of `rounding`, for numbers whose last zeros are left out."""

    def states(self, *names: str) -> bool:
        """Return whether lines have one of these numbers."""
        return not re.compile(self.pattern).groupindex.keys().isdisjoint(names)

    def numbers(self, line: str) -> Iterator[dict[str, float]]:
        """Yield each match's numbers, and as `rounding` half of the last digit of the rate or time,
        relative to it."""
        for match in re.finditer(self.pattern, line) if self.gate in line else ():
            texts = {name: text for name, text in match.groupdict().items() if text}
            numbers = {name: _parse_number(text) for name, text in texts.items()}
            value_name = next(name for name in VALUES if name in texts)
            decimals = len(texts[value_name].partition(".")[2])
            numbers["rounding"] = min(
                0.5 * 10.0**-decimals / max(numbers[value_name], 1e-9), self.most_rounding
            )
            if value_name == "step_ms":
                numbers["step_s"] = numbers.pop("step_ms") / 1000
            yield numbers


def _parse_number(text: str) -> float:
    """Parse `10,050`, or a time such as `1:02:03` as seconds."""
    number = 0.0
    for part in text.replace(",", "").split(":"):
        number = 60 * number + float(part)
    return number


DIALECTS = {
    # global_step=50, RunningAvgSamplesPerSec=R, CurrSamplesPerSec=c, MemAllocated=1GB,
    # MaxMemAllocated=1GB 0/50, RunningAvgSamplesPerSec=R, CurrSamplesPerSec=c, … (0.7) or 0/50,
    # SamplesPerSec=R, … (before)
    "DeepSpeed": Dialect(
        "SamplesPerSec=",
        rf"(?:global_step=|(?<![\d/])0/)(?P<step>\d{{1,15}}), (RunningAvg)?SamplesPerSec=(?P<average>{NUMBER})"
        rf"(?(2), CurrSamplesPerSec={NUMBER})(?=[,\s])"
        rf"(?:, MemAllocated={NUMBER}GB, MaxMemAllocated=(?P<memory_gib>{NUMBER})GB)?",
        untimed=2,
        counts_data_wait=False,
    ),
    # Train Epoch: 0 [ 616/100000 (1%)] Data (t): 0.012 Batch (t): 0.987, 623.7/s, 623.7/s/gpu
    # (LAION-CLAP ends after the time; in 2021 without colons)
    "open_clip and LAION-CLAP": Dialect(
        "Train Epoch: ",
        r"Train Epoch: (?P<epoch>\d{1,6}) \[ {0,20}(?P<samples>\d{1,12})/\d{1,12} \(\d{1,3}%\)\]\s.{0,400}?"
        r"Batch \(t\):? (?P<step_s>\d{1,9}\.\d{1,9})(?=[\s,])",
    ),
    # iteration 12/ 500 | consumed samples: 12288 | elapsed time per iteration (ms): 865.2 | … |
    # global batch size: 1024 |
    "Megatron-LM": Dialect(
        "elapsed time per iteration",
        r"consumed samples: {1,20}(?P<samples>\d{1,15}) .{0,60}?elapsed time per iteration \(ms\): {1,20}"
        rf"(?P<step_ms>{NUMBER})[ /].{{0,400}}?gl\w{{1,20}} batch size: {{1,20}}(?P<global_batch>[1-9]\d{{0,8}}) ",
    ),
    # step: 10  loss: 7.62585  grad_norm: 26.6250  memory: 66.91GiB(37.51%)  tps: 10,050  tflops:
    # 314.71  mfu: 13.99%
    "torchtitan": Dialect(
        "  loss: ",
        rf"step: {{1,20}}(?P<step>\d{{1,15}})  loss: .{{0,200}}?memory: {{1,20}}(?P<memory_gib>{NUMBER})GiB"
        r".{0,40}? [tw]ps: {1,20}(?P<gpu_tokens>\d{1,3}(?:,\d{3}){0,5})(?=\s)",
    ),
    # Training epoch 0, iteration 45/99 | … | global_batch_size: 128 | global_step: 45 | … |
    # train_step_timing in s: 6.08 |
    "NeMo": Dialect(
        "train_step_timing in s: ",
        r"global_batch_size: (?P<global_batch>[1-9]\d{0,8}) \| global_step: (?P<step>\d{1,15}) .{0,400}?"
        rf"train_step_timing in s: (?P<step_s>{NUMBER})(?=\s)",
        most_rounding=0.0005,  # four significant digits
    ),
    # Epoch 0:  47%|████▋     | 700/1500 [06:19<07:13,  1.85it/s, v_num=0]
    "Lightning": Dialect(
        "Epoch ",
        r"\bEpoch (?P<epoch>\d{1,6}): [^\[]{0,300}?(?<!\d)(?P<step>\d{1,12})/(?:\d{1,12}|\?) \[(?P<elapsed>[\d:]{4,12})<",
    ),
    #     Train throughput/samples_per_sec: 2.7330
    "Composer": Dialect(
        "throughput/samples_per_sec", rf"Train throughput/samples_per_sec: (?P<rate>{NUMBER})\s"
    ),
    # {'train_runtime': 158.4339, 'train_samples_per_second': 108.184, 'train_steps_per_second':
    # 3.383, … (or quoted numbers)
    "Hugging Face Trainer": Dialect(
        "'train_runtime'",
        rf"'train_runtime': '?(?P<elapsed>{NUMBER})'?, 'train_samples_per_second': '?(?P<rate>{NUMBER})(?=[',])",
    ),
}
"""Formats by program. To support another program, add an entry."""

_DOTS = r" [ .]{0,100}"
_COUNT = r"([1-9]\d{0,14})\b"
_LINES: dict[str, dict[str, str]] = {
    "run directory: ": {"directory": r"run directory: ([^\n\r\x1b]{1,300})"},
    "ranks: ": {
        "gpus": r"\branks: ([1-9]\d{0,14}), nodes: \d",
        "nodes": r"\branks: \d{1,15}, nodes: " + _COUNT,
    },
    "num_local_procs=": {"nodes": r"nnodes=([1-9]\d{0,14}), num_local_procs=\d"},
    "dist_world_size=": {"gpus": r"dist_world_size=" + _COUNT},
    "using world size: ": {"gpus": r"using world size: " + _COUNT},  # Megatron-LM
    "num_nodes: ": {"nodes": r"\bnum_nodes: " + _COUNT},  # Composer
    "num_gpus_per_node: ": {"gpus_per_node": r"\bnum_gpus_per_node: " + _COUNT},
    " sequence length ": {  # torchtitan
        "global_batch": r"global batch size " + _COUNT + ".{0,200}? sequence length",
        "sequence_length": r"global batch size \d.{0,200}? sequence length " + _COUNT,
    },
    "Instantaneous batch size per ": {
        "micro_batch": "batch size per device = " + _COUNT + "(?!,)"
    },  # Hugging Face Trainer
    "Gradient Accumulation steps ": {"accumulation": "Accumulation steps = " + _COUNT},
    " ...": {  # DeepSpeed's world size is that of data parallelism
        "replicas": r"(?<![a-z_])world_size" + _DOTS + _COUNT,
        "global_batch": r"train_batch_size" + _DOTS + _COUNT,
        "precision": r"\b(b?float16)_(?:config|enabled)" + _DOTS + r"(?:enabled=)?True",
    },
    "gradient_accumulation_steps ": {
        "accumulation": r"gradient_accumulation_steps" + _DOTS + _COUNT
    },
    "train_micro_batch_size_per_gpu ": {
        "micro_batch": r"train_micro_batch_size_per_gpu" + _DOTS + _COUNT
    },
    " |   ": {  # open_clip's and LAION-CLAP's parameters
        "gpus": r"\|   world_size: " + _COUNT,
        "micro_batch": r"\|   batch_size: " + _COUNT,
        "accumulation": r"\|   accum_freq: " + _COUNT,
        "model": r"\|   model: ([\w-]{1,80})",
        "precision": r"\|   precision: (\w{1,40})",
    },
    "OutOfMemoryError": {"out_of_memory": r"OutOfMemoryError"},
    " out of memory": {"out_of_memory": r"CUDA out of memory"},
    "CANCELLED AT": {
        "timeout": r"CANCELLED AT.{0,200}?DUE TO TIME LIMIT",
        "terminated": r"CANCELLED AT",
    },
    "process received SIG": {"terminated": r"Main process received SIG"},
    "Traceback (most": {"failed": r"Traceback \(most recent call last\)"},
    "exits with return": {"failed": r"exits with return code = -?[1-9]"},
    "exits successfully": {"completed": r"exits successfully"},
}
"""Patterns by a text that the line must contain: searching for the text first is much faster."""
_PATTERNS = [
    (gate, [(kind, re.compile(pattern)) for kind, pattern in lines.items()])
    for gate, lines in _LINES.items()
]


_TITLE = re.compile(
    r"(?<![\w:.-])(?P<model>[\w:.-]++) on (?P<gpus>[1-9]\d{0,14}) × (?P<device>.{1,200}?), (?P<nodes>[1-9]\d{0,14}) nodes?,"
    r" (?P<precision>\w{1,40}), micro-batch (?P<micro_batch>[1-9]\d{0,14})(?:, accumulation (?P<accumulation>[1-9]\d{0,14}))?,"
    r" (?P<context_length>[1-9]\d{0,14}) text tokens"
)
"""`run_title` in `clap_ds/metrics/terminal.py`."""


def title_in(line: str) -> dict[str, str]:
    """Return what this project's title states, by kind. It stands before a run's steps and above
    its results, so unlike other facts it begins no new start."""
    match = _TITLE.search(line) if " text tokens" in line else None
    if match is None:
        return {}
    facts = match.groupdict(default="1")
    # In merged lines, another line's end may stand before the name.
    presets = [name for name in preset_names() if facts["model"].endswith(name)]
    facts["model"] = max(presets, key=len, default=facts["model"][:80])
    return facts


def facts_in(line: str) -> Iterator[tuple[str, str]]:
    """Yield the facts of a line other than progress: (kind, text)."""
    for gate, patterns in _PATTERNS:
        for kind, pattern in patterns if gate in line else ():
            for match in pattern.finditer(line):
                yield kind, match[1] if match.lastindex else ""
