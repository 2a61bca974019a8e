"""Formats of log lines: progress lines by program, and all other lines that state facts.

Named groups of a format's pattern say what its numbers are:

| group | number |
|---|---|
| `step` or `samples` | done so far, since the epoch's start if there is `epoch` |
| `average` | samples/s of all GPUs since the first timed step, so any two lines give the exact rate |
| `rate` | samples/s of all GPUs since the previous line |
| `gpu_tokens` | tokens/s of one GPU since the previous line |
| `step_s` or `step_ms` | mean time per step since the previous line |
| `elapsed` | time since the start, or the epoch's start: seconds, or 1:02:03 |
| `global_batch` | samples per step over all GPUs |
| `gpus` | number of GPUs |
| `memory_gib` | peak memory of a GPU so far |

A line has one of `average` … `elapsed`. A line without a position is one step, or with `rate` and
`elapsed` a summary of the whole run. Facts of `_FACTS` begin a new start, which a progress line's
`global_batch` and `gpus` don't.

Patterns are not anchored to a line's start, so prefixes (pdsh, srun) don't matter. Their repeats
are bounded: a search of a long line that repeats a pattern's beginning would take quadratic time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from clap_ds.config.model_names import list_presets

SPEEDS = ("average", "rate", "gpu_tokens", "step_s", "step_ms", "elapsed")
NUMBER = r"(?:\d{1,20}(?:\.\d{0,30})?(?:[eE][+-]?\d{1,3})?)"


@dataclass(frozen=True)
class LogFormat:
    """Progress lines of one program."""

    # A text that each line contains: searching for it first is much faster.
    marker: str
    pattern: str | re.Pattern[str]
    # First steps that are not timed.
    untimed: int = 0
    counts_data_wait: bool = True
    # Upper limit of `rounding`, for numbers whose last zeros are left out.
    max_rounding: float = 1.0

    def states(self, *names: str) -> bool:
        """Return whether lines have one of these numbers."""
        return not re.compile(self.pattern).groupindex.keys().isdisjoint(names)

    def numbers(self, line: str) -> Iterator[dict[str, float]]:
        """Yield each match's numbers, and as `rounding` half of the last digit of the rate or time,
        relative to it."""
        if self.marker not in line:
            return
        for match in re.finditer(self.pattern, line):
            texts = {name: text for name, text in match.groupdict().items() if text}
            numbers = {name: _parse_number(text) for name, text in texts.items()}
            speed = next(name for name in SPEEDS if name in texts)
            decimals = len(texts[speed].partition(".")[2])
            rounding = 0.5 * 10.0**-decimals / max(numbers[speed], 1e-9)
            numbers["rounding"] = min(rounding, self.max_rounding)
            if speed == "step_ms":
                numbers["step_s"] = numbers.pop("step_ms") / 1000
            yield numbers


def _parse_number(text: str) -> float:
    """Parse `10,050`, or a time such as `1:02:03` as seconds."""
    number = 0.0
    for part in text.replace(",", "").split(":"):
        number = 60 * number + float(part)
    return number


# Formats by program. To support another program, add an entry.
LOG_FORMATS = {
    # global_step=50, RunningAvgSamplesPerSec=R, CurrSamplesPerSec=c, MemAllocated=1GB, MaxMemAllocated=1GB
    # 0.7: 0/50, RunningAvgSamplesPerSec=R, CurrSamplesPerSec=c, …
    # before: 0/50, SamplesPerSec=R, …
    "DeepSpeed": LogFormat(
        "SamplesPerSec=",
        rf"(?:global_step=|(?<![\d/])0/)(?P<step>\d{{1,15}}), (RunningAvg)?SamplesPerSec=(?P<average>{NUMBER})"
        rf"(?(2), CurrSamplesPerSec={NUMBER})(?=[,\s])"
        rf"(?:, MemAllocated={NUMBER}GB, MaxMemAllocated=(?P<memory_gib>{NUMBER})GB)?",
        untimed=2,
        counts_data_wait=False,
    ),
    # Train Epoch: 0 [ 616/100000 (1%)] Data (t): 0.012 Batch (t): 0.987, 623.7/s, 623.7/s/gpu
    # (LAION-CLAP ends after the time; in 2021 without colons)
    "open_clip and LAION-CLAP": LogFormat(
        "Train Epoch: ",
        r"Train Epoch: (?P<epoch>\d{1,6}) \[ {0,20}(?P<samples>\d{1,12})/\d{1,12} \(\d{1,3}%\)\]\s.{0,400}?"
        r"Batch \(t\):? (?P<step_s>\d{1,9}\.\d{1,9})(?=[\s,])",
    ),
    # iteration 12/ 500 | consumed samples: 12288 | elapsed time per iteration (ms): 865.2 | … |
    # global batch size: 1024 |
    "Megatron-LM": LogFormat(
        "elapsed time per iteration",
        r"consumed samples: {1,20}(?P<samples>\d{1,15}) .{0,60}?elapsed time per iteration \(ms\): {1,20}"
        rf"(?P<step_ms>{NUMBER})[ /].{{0,400}}?gl\w{{1,20}} batch size: {{1,20}}(?P<global_batch>[1-9]\d{{0,8}}) ",
    ),
    # step: 10  loss: 7.62585  grad_norm: 26.6250  memory: 66.91GiB(37.51%)  tps: 10,050  tflops:
    # 314.71  mfu: 13.99%
    "torchtitan": LogFormat(
        "  loss: ",
        rf"step: {{1,20}}(?P<step>\d{{1,15}})  loss: .{{0,200}}?memory: {{1,20}}(?P<memory_gib>{NUMBER})GiB"
        r".{0,40}? [tw]ps: {1,20}(?P<gpu_tokens>\d{1,3}(?:,\d{3}){0,5})(?=\s)",
    ),
    # Training epoch 0, iteration 45/99 | … | global_batch_size: 128 | global_step: 45 | … |
    # train_step_timing in s: 6.08 |
    "NeMo": LogFormat(
        "train_step_timing in s: ",
        r"global_batch_size: (?P<global_batch>[1-9]\d{0,8}) \| global_step: (?P<step>\d{1,15}) .{0,400}?"
        rf"train_step_timing in s: (?P<step_s>{NUMBER})(?=\s)",
        # Four significant digits.
        max_rounding=0.0005,
    ),
    # Epoch 0:  47%|████▋     | 700/1500 [06:19<07:13,  1.85it/s, v_num=0]
    "Lightning": LogFormat(
        "Epoch ",
        r"\bEpoch (?P<epoch>\d{1,6}): [^\[]{0,300}?(?<!\d)(?P<step>\d{1,12})/(?:\d{1,12}|\?) \[(?P<elapsed>[\d:]{4,12})<",
    ),
    #     Train throughput/samples_per_sec: 2.7330
    "Composer": LogFormat(
        "throughput/samples_per_sec", rf"Train throughput/samples_per_sec: (?P<rate>{NUMBER})\s"
    ),
    # {'train_runtime': 158.4339, 'train_samples_per_second': 108.184, 'train_steps_per_second':
    # 3.383, … (or quoted numbers)
    "Hugging Face Trainer": LogFormat(
        "'train_runtime'",
        rf"'train_runtime': '?(?P<elapsed>{NUMBER})'?, 'train_samples_per_second': '?(?P<rate>{NUMBER})(?=[',])",
    ),
}

_DOTS = r" [ .]{0,100}"
_COUNT = r"([1-9]\d{0,14})\b"


def _compile(**patterns: str) -> dict[str, re.Pattern[str]]:
    return {kind: re.compile(pattern) for kind, pattern in patterns.items()}


# Patterns by a text that the line must contain.
_FACTS = {
    # This project
    "run directory: ": _compile(directory=r"run directory: ([^\n\r\x1b]{1,300})"),
    "ranks: ": _compile(
        gpus=r"\branks: ([1-9]\d{0,14}), nodes: \d",
        nodes=r"\branks: \d{1,15}, nodes: " + _COUNT,
    ),
    # DeepSpeed's launcher
    "num_local_procs=": _compile(nodes=r"nnodes=([1-9]\d{0,14}), num_local_procs=\d"),
    "dist_world_size=": _compile(gpus=r"dist_world_size=" + _COUNT),
    # Megatron-LM
    "using world size: ": _compile(gpus=r"using world size: " + _COUNT),
    # Composer
    "num_nodes: ": _compile(nodes=r"\bnum_nodes: " + _COUNT),
    "num_gpus_per_node: ": _compile(gpus_per_node=r"\bnum_gpus_per_node: " + _COUNT),
    # torchtitan
    " sequence length ": _compile(
        global_batch=r"global batch size " + _COUNT + ".{0,200}? sequence length",
        sequence_length=r"global batch size \d.{0,200}? sequence length " + _COUNT,
    ),
    # Hugging Face Trainer
    "Instantaneous batch size per ": _compile(
        micro_batch="batch size per device = " + _COUNT + "(?!,)",
    ),
    "Gradient Accumulation steps ": _compile(accumulation="Accumulation steps = " + _COUNT),
    # DeepSpeed, whose world size is that of data parallelism
    " ...": _compile(
        replicas=r"(?<![a-z_])world_size" + _DOTS + _COUNT,
        global_batch=r"train_batch_size" + _DOTS + _COUNT,
        precision=r"\b(b?float16)_(?:config|enabled)" + _DOTS + r"(?:enabled=)?True",
    ),
    "gradient_accumulation_steps ": _compile(
        accumulation=r"gradient_accumulation_steps" + _DOTS + _COUNT
    ),
    "train_micro_batch_size_per_gpu ": _compile(
        micro_batch=r"train_micro_batch_size_per_gpu" + _DOTS + _COUNT
    ),
    # Parameters of open_clip and LAION-CLAP
    " |   ": _compile(
        gpus=r"\|   world_size: " + _COUNT,
        micro_batch=r"\|   batch_size: " + _COUNT,
        accumulation=r"\|   accum_freq: " + _COUNT,
        model=r"\|   model: ([\w-]{1,80})",
        precision=r"\|   precision: (\w{1,40})",
    ),
    # States of a run
    "OutOfMemoryError": _compile(out_of_memory=r"OutOfMemoryError"),
    " out of memory": _compile(out_of_memory=r"CUDA out of memory"),
    "CANCELLED AT": _compile(
        timeout=r"CANCELLED AT.{0,200}?DUE TO TIME LIMIT",
        terminated=r"CANCELLED AT",
    ),
    "process received SIG": _compile(terminated=r"Main process received SIG"),
    "Traceback (most": _compile(failed=r"Traceback \(most recent call last\)"),
    "exits with return": _compile(failed=r"exits with return code = -?[1-9]"),
    "exits successfully": _compile(completed=r"exits successfully"),
}


# `run_title` in `clap_ds/metrics/terminal.py`.
_TITLE = re.compile(
    r"(?<![\w:.-])(?P<model>[\w:.-]++) on (?P<gpus>[1-9]\d{0,14}) × (?P<device>.{1,200}?), (?P<nodes>[1-9]\d{0,14}) nodes?,"
    r" (?P<precision>\w{1,40}), micro-batch (?P<micro_batch>[1-9]\d{0,14})(?:, accumulation (?P<accumulation>[1-9]\d{0,14}))?,"
    r" (?P<context_length>[1-9]\d{0,14}) text tokens"
)


def find_title(line: str) -> dict[str, str]:
    """Return what this project's title states, by kind. It stands before a run's steps and above
    its results, so unlike other facts it begins no new start."""
    match = _TITLE.search(line) if " text tokens" in line else None
    if match is None:
        return {}
    facts = match.groupdict(default="1")
    # In merged lines, another line's end may stand before the name.
    presets = [name for name in list_presets() if facts["model"].endswith(name)]
    facts["model"] = max(presets, key=len, default=facts["model"][:80])
    return facts


def find_facts(line: str) -> Iterator[tuple[str, str]]:
    """Yield the facts of a line other than progress: (kind, text)."""
    for marker, patterns in _FACTS.items():
        if marker not in line:
            continue
        for kind, pattern in patterns.items():
            for match in pattern.finditer(line):
                yield kind, match[1] if match.lastindex else ""
