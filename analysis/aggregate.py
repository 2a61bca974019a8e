"""Combine repeats of one scale into one row with their mean and its uncertainty.

± is half the 95% interval by Student's t. The spread is pooled over all repeated scales of the
table; a scale with a far larger one uses its own. A scale that ran once has no ±.

Group runs into repeats and series. Repeats have the same configuration, code and hardware; a
series is their scales.

Runs that differ in anything else form separate series, named by the difference
(`gradient_sync=deepspeed`).
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from textwrap import shorten
from typing import Any

from clap_ds.analysis.published import published_mfu_percent
from clap_ds.analysis.table import ENERGY, Run, Scale
from clap_ds.metrics.intervals import COVERAGE, student_t
from clap_ds.run_records.schema import STEP_PHASES
from clap_ds.utils.files import flatten

FAR_LARGER = 1.5
"""A scale uses its own spread if it exceeds that of all scales by this factor."""
OUTLYING = 0.05
"""A repeat is named if it differs by this share from the median of three or more."""
GOOD_STATES = ("completed", "published", "unknown")
"""`unknown`: a log without a launcher's last line; its rate counts."""
_IDENTITY = (
    "nodes", "gpus", "model", "scaling", "device", "precision", "context_length", "variant", "micro_batch", "batch_per_gpu",
)  # fmt: skip
_AVERAGED = ("samples_per_s_per_gpu", "deepspeed_samples_per_s_per_gpu", "achieved_tflops", "mfu_model_percent", "step_time_s",
             "slowest_rank_step_time_s", "data_wait_percent", *ENERGY, *(f"{part}_s" for part in STEP_PHASES))  # fmt: skip


@dataclass(frozen=True)
class RunSpread:
    """Spread of runs of one configuration."""

    deviation: float
    """Standard deviation of the logarithm of the rate."""
    degrees: int
    """Degrees of freedom: runs minus scales."""
    runs: int

    def half_width(self, repeats: int = 1) -> float:
        """Return half the interval of the mean of `repeats` runs, relative to it."""
        return student_t(COVERAGE, self.degrees) * self.deviation / math.sqrt(repeats)

    def label(self) -> str:
        differ = f"runs of one scale differ by {100 * self.deviation:.2g}%"
        return (
            f"95% by Student's t, {differ} (of {self.runs} runs, {self.degrees} degrees of freedom)"
        )


def run_spreads(scales: Sequence[Sequence[Run]]) -> list[RunSpread | None]:
    """Return each scale's spread for its ±: that of all scales, or its own if that is far larger;
    None if it ran once."""
    pooled = pooled_spread(scales)
    own = [pooled_spread([runs]) for runs in scales]
    return [
        spread
        and pooled
        and (spread if spread.deviation > FAR_LARGER * pooled.deviation else pooled)
        for spread in own
    ]


def counted(runs: Iterable[Run]) -> list[Run]:
    """Return the runs of one scale that count: those that completed, or all with a rate if none
    did."""
    with_rate = [run for run in runs if run.rate]
    return [run for run in with_rate if run.state in GOOD_STATES] or with_rate


def pooled_spread(scales: Iterable[Sequence[Run]]) -> RunSpread | None:
    """Return the spread of all repeated scales, at least what the rates' digits resolve; None
    without repeats."""
    squares = 0.0
    degrees = 0
    repeats = 0
    rounding = 0.0
    for runs in scales:
        repeated = counted(runs)
        if len(repeated) < 2:
            continue
        logs = [math.log(run.rate) for run in repeated if run.rate]
        mean = fmean(logs)
        squares += sum((value - mean) ** 2 for value in logs)
        degrees += len(logs) - 1
        repeats += len(logs)
        rounding = max(rounding, min(run.rounding for run in repeated))
    return (
        RunSpread(max(math.sqrt(squares / degrees), rounding), degrees, repeats)
        if degrees
        else None
    )


def combine_repeats(runs: Sequence[Run], spread: RunSpread | None = None) -> Scale:
    """Make one row from the runs of one series at one scale. Throughput is empty if no run measured
    it."""
    first = runs[0]
    used = counted(runs)
    known: dict[str, Any] = {name: getattr(first, name) for name in _IDENTITY}
    for name in _AVERAGED:
        values = [value for run in used if (value := getattr(run, name)) is not None]
        known[name] = fmean(values) if values else None
    rate = known["samples_per_s_per_gpu"]
    exposed = known["exposed_communication_s"]
    peak = next((run.peak_tflops for run in used if run.peak_tflops), None)
    half, half_from = (
        (used[0].samples_per_s_per_gpu_ci95, used[0].uncertainty_from) if used else (None, "")
    )
    if rate and spread and len(used) > 1:
        half = rate * spread.half_width(len(used))
        half_from = spread.label()
    states = Counter(run.state for run in runs)
    return Scale(
        runs=tuple(used), **known, peak_tflops=peak,
        mfu_published_percent=rate and published_mfu_percent(first.model, rate, peak),
        samples_per_s=rate and rate * first.gpus, samples_per_s_per_gpu_ci95=half,
        uncertainty_from=half_from, repeats=sum(run.repeats or 1 for run in used), global_batch=global_batch(first),
        exposed_communication_percent=exposed and 100 * exposed / sum(known[f"{part}_s"] or 0 for part in STEP_PHASES),
        memory_peak_gib=max((run.memory_peak_gib for run in runs if run.memory_peak_gib), default=None),
        state=first.state if len(states) == 1 else ", ".join(f"{n} {state}" for state, n in states.most_common()),
        notes="; ".join(dict.fromkeys(_notes(runs, used))),
    )  # fmt: skip


def _notes(runs: Sequence[Run], used: Sequence[Run]) -> Iterator[str]:
    for run in runs:
        yield from filter(None, run.notes.split("; "))
    if len(used) > 2:
        middle = median(run.rate or 0.0 for run in used)
        for run in used:
            off = (run.rate or 0.0) / middle - 1
            if abs(off) > OUTLYING:
                yield f"{run.name} is {100 * off:+.1f}% from the median repeat"
    for run in runs:
        if run.error:
            yield f"{run.state}: {shorten(run.error.replace(';', ','), 120, placeholder=' …')}"


IGNORED_SETTINGS = (
    "clap.output.", "clap.seed", "clap.checkpoint.folder", "clap.checkpoint.remote_sync", "clap.train.resume",
    "steps_per_print", "train_batch_size", "train_micro_batch_size_per_gpu", "tensorboard.", "comms_logger.",
    "optimizer.params.lr", "scheduler.", "clap.bench.windows", "clap.bench.breakdown_steps",
)  # fmt: skip
"""Settings that may differ between repeats: names, paths, seeds, the learning rate, for how long is
measured, and batches, which are compared separately. Only the last part of a path counts."""
ACCUMULATION = "gradient_accumulation_steps"
_FOLDERS = re.compile(r'(?<![^\s",\[])[^\s",\[]*/')


def split_series(runs: Sequence[Run]) -> list[Run]:
    """Fill in `scaling` and `variant`, which identify a series with model, GPU, precision and
    caption length. Rows of tables that state their scaling stay as they are."""
    found = [run for run in runs if run.scaling]
    groups: dict[tuple[object, ...], list[Run]] = defaultdict(list)
    for run in runs:
        if not run.scaling:
            groups[
                run.model, run.device, run.precision, run.context_length or 0, run.variant
            ].append(run)
    for (*_, given), group in groups.items():
        for settings, alike in split_settings(group):
            found += _with_scaling(alike, ", ".join(filter(None, (str(given), settings))))
    return found


def _with_scaling(runs: Sequence[Run], variant: str) -> Iterator[Run]:
    """Runs of one batch per GPU are weak scaling, of one global batch strong. Otherwise each batch
    per GPU is a series."""
    batches = {run.batch_per_gpu for run in runs if run.batch_per_gpu}
    is_mixed = len(batches) > 1
    is_strong = len({global_batch(run) for run in runs if run.batch_per_gpu}) == 1
    for run in runs:
        batch = run.batch_per_gpu if is_mixed else max(batches, default=None)
        name = variant
        if is_mixed and not is_strong:
            name = ", ".join(filter(None, (variant, f"batch per GPU {batch or 'not stated'}")))
        scaling = "strong" if is_mixed and is_strong else "weak" if batches else ""
        yield replace(
            run, variant=name, batch_per_gpu=batch, scaling=scaling
        )  # a failed run may not state its batch


def split_settings(group: Sequence[Run]) -> list[tuple[str, list[Run]]]:
    """Group runs of the same settings, code and hardware; name groups by as few differences as
    distinguish them."""
    if len(group) == 1:
        return [("", [*group])]
    import pandas as pd

    facts = pd.DataFrame([_facts(run) for run in group]).fillna("not recorded")
    scales = [(run.nodes, run.gpus, run.batch_per_gpu) for run in group]
    if len({*zip(scales, facts[ACCUMULATION], strict=True)}) == len({*scales}):
        facts = facts.drop(columns=ACCUMULATION)  # implied by the scale
    titles = pd.Series([""] * len(group))
    for name in sorted(
        facts, key=lambda name: name.startswith("clap.bench.")
    ):  # measurement settings matter least
        longer = titles + f", {name.removeprefix('clap.')}=" + facts[name].str[:40]
        titles = longer if longer.nunique() > titles.nunique() else titles
    return [
        (title[2:], [group[at] for at in places])
        for title, places in titles.groupby(titles).indices.items()
    ]


def _facts(run: Run) -> dict[str, str]:
    """Return settings, code and hardware as text by dotted names, settings first."""
    found = {
        name: value
        for name, value in flatten(run.config).items()
        if not name.startswith(IGNORED_SETTINGS)
    }
    found[ACCUMULATION] = run.accumulation
    known = {**(run.environment.get("versions") or {}), **run.environment}
    found |= {
        name: known[name]
        for name in ("clap_ds", "torch", "deepspeed", "cpu_kernels")
        if known.get(name)
    }
    if commit := str(known.get("git_commit") or ""):
        found["commit"] = commit[:12] + commit[40:]
    if devices := known.get("device_names"):
        found["devices"] = " and ".join(sorted(set(map(str, devices))))
    return {name: _FOLDERS.sub("", _text(value)) for name, value in found.items()}


def _text(value: object) -> str:
    return value.rstrip("/") if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def global_batch(run: Run) -> int | None:
    return run.batch_per_gpu and run.batch_per_gpu * run.gpus
