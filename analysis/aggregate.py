"""Group runs into series of scales, and combine the repeats of a scale into one row.

Repeats have the same configuration, code and hardware; a series is their scales. Runs that differ
in anything else form separate series, named by the difference (`gradient_sync=deepspeed`).

A row has the mean of its repeats. ± is half the 95% interval by Student's t, whose spread is pooled
over all repeated scales of the table. A scale with a far larger spread uses its own. A scale that
ran once has no ±.
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

import pandas as pd

from clap_ds.analysis.published import published_mfu_percent
from clap_ds.analysis.table import ENERGY_COLUMNS, GOOD_STATES, Run, Scale, join_texts
from clap_ds.metrics.intervals import COVERAGE, student_t
from clap_ds.run_records.schema import STEP_PHASES
from clap_ds.utils.files import flatten

# A scale uses its own spread if it exceeds that of all scales by this factor.
FAR_LARGER = 1.5
# A repeat is named if it differs by this fraction from the median of three or more.
OUTLYING = 0.05
# Equal in all repeats of a scale.
_IDENTITY = (
    "nodes",
    "gpus",
    "model",
    "scaling",
    "device",
    "precision",
    "context_length",
    "variant",
    "micro_batch",
    "batch_per_gpu",
)
_AVERAGED = (
    "samples_per_s_per_gpu",
    "deepspeed_samples_per_s_per_gpu",
    "achieved_tflops",
    "mfu_model_percent",
    "step_time_s",
    "slowest_rank_step_time_s",
    "data_wait_percent",
    *ENERGY_COLUMNS,
    *(f"{part}_s" for part in STEP_PHASES),
)


@dataclass(frozen=True)
class RunSpread:
    """Spread of runs of one configuration."""

    # Standard deviation of the logarithm of the rate.
    deviation: float
    # Degrees of freedom: runs minus scales.
    degrees: int
    runs: int

    def half_width(self, repeats: int = 1) -> float:
        """Return half the interval of the mean of `repeats` runs, relative to it."""
        return student_t(COVERAGE, self.degrees) * self.deviation / math.sqrt(repeats)

    def label(self) -> str:
        sample = f"of {self.runs} runs, {self.degrees} degrees of freedom"
        percent = f"{100 * self.deviation:.2g}%"
        return f"95% by Student's t, runs of one scale differ by {percent} ({sample})"


def choose_spreads(scales: Sequence[Sequence[Run]]) -> list[RunSpread | None]:
    """Return each scale's spread for its ±: that of all scales, or its own if that is far larger;
    None if it ran once."""
    pooled = pool_spread(scales)
    spreads = []
    for runs in scales:
        spread = pool_spread([runs])
        if spread and pooled and spread.deviation <= FAR_LARGER * pooled.deviation:
            spread = pooled
        spreads.append(spread)
    return spreads


def select_measured(runs: Iterable[Run]) -> list[Run]:
    """Return the runs of one scale that count: those that completed, or all with a rate if none
    did."""
    with_rate = [run for run in runs if run.rate]
    return [run for run in with_rate if run.state in GOOD_STATES] or with_rate


def pool_spread(scales: Iterable[Sequence[Run]]) -> RunSpread | None:
    """Return the spread of all repeated scales, at least what the rates' digits resolve; None
    without repeats."""
    squares = 0.0
    degrees = 0
    repeats = 0
    rounding = 0.0
    for runs in scales:
        measured = select_measured(runs)
        if len(measured) < 2:
            continue
        logs = [math.log(run.rate or 0.0) for run in measured]
        mean = fmean(logs)
        squares += sum((value - mean) ** 2 for value in logs)
        degrees += len(logs) - 1
        repeats += len(logs)
        rounding = max(rounding, min(run.rounding for run in measured))
    if not degrees:
        return None
    return RunSpread(max(math.sqrt(squares / degrees), rounding), degrees, repeats)


def combine_repeats(runs: Sequence[Run], spread: RunSpread | None = None) -> Scale:
    """Make one row from the runs of one series at one scale. Throughput is empty if no run measured
    it."""
    reference = runs[0]
    measured = select_measured(runs)
    columns: dict[str, Any] = {name: getattr(reference, name) for name in _IDENTITY}
    for name in _AVERAGED:
        values = [value for run in measured if (value := getattr(run, name)) is not None]
        columns[name] = fmean(values) if values else None
    rate = columns["samples_per_s_per_gpu"]
    if rate:
        peak = next((run.peak_tflops for run in measured if run.peak_tflops), None)
        columns |= {
            "peak_tflops": peak,
            "samples_per_s": rate * reference.gpus,
            "mfu_published_percent": published_mfu_percent(reference.model, rate, peak),
            # A table may state the ± of its rows.
            "samples_per_s_per_gpu_ci95": measured[0].samples_per_s_per_gpu_ci95,
            "uncertainty_from": measured[0].uncertainty_from,
        }
    if spread and len(measured) > 1:
        columns["samples_per_s_per_gpu_ci95"] = rate * spread.half_width(len(measured))
        columns["uncertainty_from"] = spread.label()
    exposed_s = columns["exposed_communication_s"]
    if exposed_s is not None:
        step_s = sum(columns[f"{part}_s"] or 0 for part in STEP_PHASES)
        columns["exposed_communication_percent"] = 100 * exposed_s / (step_s or 1.0)
    # Failed runs, too, show how much memory the scale takes.
    memory_gib = [run.memory_peak_gib for run in runs if run.memory_peak_gib]
    states = Counter(run.state for run in runs).most_common()
    state = reference.state
    if len(states) > 1:
        state = ", ".join(f"{count} {name}" for name, count in states)
    return Scale(
        **columns,
        runs=tuple(measured),
        repeats=sum(run.repeats or 1 for run in measured),
        global_batch=global_batch(reference),
        memory_peak_gib=max(memory_gib, default=None),
        state=state,
        notes="; ".join(dict.fromkeys(_collect_notes(runs, measured))),
    )


def _collect_notes(runs: Sequence[Run], measured: Sequence[Run]) -> Iterator[str]:
    for run in runs:
        yield from filter(None, run.notes.split("; "))
    # Of two repeats, neither is the outlier.
    if len(measured) > 2:
        middle = median(run.rate or 0.0 for run in measured)
        for run in measured:
            deviation = (run.rate or 0.0) / middle - 1
            if abs(deviation) > OUTLYING:
                yield f"{run.name} is {100 * deviation:+.1f}% from the median repeat"
    for run in runs:
        if run.error:
            # Semicolons separate notes.
            error = run.error.replace(";", ",")
            yield f"{run.state}: {shorten(error, 120, placeholder=' …')}"


# Settings that may differ between repeats: names, paths, seeds, the learning rate, for how long is
# measured, and batches, which are compared separately. Only the last part of a path counts.
IGNORED_SETTINGS = (
    "clap.output.",
    "clap.seed",
    "clap.checkpoint.folder",
    "clap.checkpoint.remote_sync",
    "clap.train.resume",
    "steps_per_print",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "tensorboard.",
    "comms_logger.",
    "optimizer.params.lr",
    "scheduler.",
    "clap.bench.windows",
    "clap.profile",
    "clap.bench.breakdown_steps",
)
ACCUMULATION = "gradient_accumulation_steps"
_FOLDERS = re.compile(r'(?<![^\s",\[])[^\s",\[]*/')


def split_series(runs: Sequence[Run]) -> list[Run]:
    """Fill in `scaling` and `variant`, which identify a series with model, GPU, precision and
    caption length. Rows of tables that state their scaling stay as they are."""
    labeled = [run for run in runs if run.scaling]
    groups = defaultdict[object, list[Run]](list)
    for run in runs:
        if not run.scaling:
            key = (run.model, run.device, run.precision, run.context_length or 0, run.variant)
            groups[key].append(run)
    for group in groups.values():
        for difference, members in split_settings(group):
            labeled += _label_scaling(members, join_texts(group[0].variant, difference))
    return labeled


def _label_scaling(runs: Sequence[Run], variant: str) -> Iterator[Run]:
    """Runs of one batch per GPU are weak scaling, of one global batch strong. Otherwise each batch
    per GPU is a series."""
    stated = [run for run in runs if run.batch_per_gpu]
    batches = {run.batch_per_gpu for run in stated}
    if len(batches) <= 1:
        # A failed run may not state its batch.
        batch = batches.pop() if batches else None
        scaling = "weak" if batch else ""
        for run in runs:
            yield replace(run, variant=variant, batch_per_gpu=batch, scaling=scaling)
    elif len({global_batch(run) for run in stated}) == 1:
        for run in runs:
            yield replace(run, variant=variant, scaling="strong")
    else:
        for run in runs:
            batch_label = f"batch per GPU {run.batch_per_gpu or 'not stated'}"
            yield replace(run, variant=join_texts(variant, batch_label), scaling="weak")


def split_settings(group: Sequence[Run]) -> list[tuple[str, list[Run]]]:
    """Group runs of the same settings, code and hardware; name groups by as few differences as
    distinguish them."""
    if len(group) == 1:
        return [("", [*group])]
    facts = pd.DataFrame([_list_facts(run) for run in group]).fillna("not recorded")
    scales = [(run.nodes, run.gpus, run.batch_per_gpu) for run in group]
    if len({*zip(scales, facts[ACCUMULATION], strict=True)}) == len({*scales}):
        # The scale implies it.
        facts = facts.drop(columns=ACCUMULATION)
    titles = pd.Series([""] * len(group))
    # How a run is measured matters least.
    for name in sorted(facts, key=lambda name: name.startswith("clap.bench.")):
        longer = titles + f", {name.removeprefix('clap.')}=" + facts[name].str[:40]
        if longer.nunique() > titles.nunique():
            titles = longer
    groups = []
    for title, rows in titles.groupby(titles).indices.items():
        groups.append((title[2:], [group[row] for row in rows]))
    return groups


def _list_facts(run: Run) -> dict[str, str]:
    """Return settings, code and hardware as text by dotted names, settings first."""
    facts = flatten(run.config)
    facts = {name: facts[name] for name in facts if not name.startswith(IGNORED_SETTINGS)}
    facts[ACCUMULATION] = run.accumulation
    environment = {**(run.environment.get("versions") or {}), **run.environment}
    for name in ("clap_ds", "torch", "deepspeed", "cpu_kernels"):
        if environment.get(name):
            facts[name] = environment[name]
    if commit := str(environment.get("git_commit") or ""):
        # What follows the hash marks uncommitted changes.
        facts["commit"] = commit[:12] + commit[40:]
    if devices := environment.get("device_names"):
        facts["devices"] = " and ".join(sorted(set(map(str, devices))))
    return {name: _FOLDERS.sub("", _format_fact(value)) for name, value in facts.items()}


def _format_fact(value: object) -> str:
    return value.rstrip("/") if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def global_batch(run: Run) -> int | None:
    return run.batch_per_gpu * run.gpus if run.batch_per_gpu else None
