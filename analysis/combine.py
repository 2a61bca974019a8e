"""Repeats of one scale → one row of the scaling table.

Median of the runs that completed (of the others only where none did, and that is said); ± is 2σ over repeats, or half
the interval that a single run's windows give. Outliers are named in the notes and stay in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from clap_ds.analysis.intervals import median_interval, outliers, two_sigma
from clap_ds.analysis.published import published_mfu_percent
from clap_ds.analysis.runs import BREAKDOWN_PARTS, Run
from clap_ds.analysis.table import Row, significant

GOOD_STATES = ("completed", "published", "unknown")
"""A log without a launcher's last line doesn't say how it ended; its rate counts."""
IGNORED_SETTINGS = (
    "clap.output.", "clap.seed", "steps_per_print", "train_batch_size", "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps", "tensorboard.", "comms_logger.",
)  # fmt: skip
"""Settings that may differ between repeats and scales without being worth a word."""


def combine_repeats(scaling: str, runs: Sequence[Run]) -> Row:
    """One row from the runs of one series at one scale. Rates stay empty where none of them measured one."""
    first = runs[0]
    assert first.num_nodes
    assert first.num_gpus
    with_rate = [run for run in runs if run.rate]
    used = [run for run in with_rate if run.state in GOOD_STATES] or with_rate
    rates = [run.rate for run in used if run.rate]
    rate = median(rates) if rates else None
    spread, spread_from = _spread(used)
    peak = next((run.peak_tflops for run in used if run.peak_tflops), None)
    breakdown = _mean_breakdown(used)
    total = used[0].total_rate if len(used) == 1 else None
    step = _median_of(used, "step_time_s")
    exposed = breakdown.get("exposed_communication")
    memory = [run.memory_peak_bytes for run in runs if run.memory_peak_bytes]
    targets = [run.time_to_target_s for run in runs if run.time_to_target_s]
    target_low, target_high = median_interval(targets)[:2] if len(targets) > 1 else (None, None)
    return Row(
        nodes=first.num_nodes,
        gpus=first.num_gpus,
        samples_per_s_per_gpu=rate,
        samples_per_s=total or (rate * first.num_gpus if rate else None),
        mfu_percent=published_mfu_percent(first.model, rate, peak) if rate else None,
        samples_per_s_per_gpu_2sigma=spread,
        uncertainty_from=spread_from,
        repeats=len(used),
        mfu_model_percent=_median_of(used, "mfu_model_percent"),
        model=first.model or "",
        scaling=scaling,
        device=first.device_name or "",
        precision=first.precision or "",
        peak_tflops=peak,
        text_tokens=first.text_tokens,
        batch_per_gpu=first.batch_per_gpu,
        global_batch=first.global_batch,
        step_time_s=step,
        slowest_rank_step_time_s=_median_of(used, "slowest_rank_step_time_s"),
        exposed_communication_percent=100 * exposed / sum(breakdown.values()) if exposed is not None else None,
        data_wait_percent=_median_of(used, "data_wait_percent"),
        memory_peak_gib=max(memory) / 1024**3 if memory else None,
        **{f"{part}_s": breakdown.get(part) for part in BREAKDOWN_PARTS},
        time_to_target_s=median(targets) if targets else None,
        time_to_target_low_s=target_low,
        time_to_target_high_s=target_high,
        state=_states(runs),
        notes="; ".join(_notes(runs, used)),
    )


def _spread(used: Sequence[Run]) -> tuple[float | None, str]:
    """(±, what it is): 2σ over repeats, or half the interval of one run's windows."""
    if len(used) > 1:
        return two_sigma([run.rate for run in used if run.rate]), f"2σ over {len(used)} repeats"
    for run in used:
        if run.rate_low is not None and run.rate_high is not None:
            return (run.rate_high - run.rate_low) / 2, run.interval_from
    return None, ""


def _median_of(runs: Sequence[Run], name: str) -> float | None:
    values = [value for run in runs if (value := getattr(run, name)) is not None]
    return median(values) if values else None


def _mean_breakdown(runs: Sequence[Run]) -> dict[str, float]:
    """Parts that every run with a breakdown has, averaged over these runs."""
    broken_down = [run.breakdown_s for run in runs if run.breakdown_s and sum(run.breakdown_s.values()) > 0]
    return {
        part: mean(parts[part] for parts in broken_down)
        for part in BREAKDOWN_PARTS
        if broken_down and all(part in parts for parts in broken_down)
    }


def _states(runs: Sequence[Run]) -> str:
    counts = Counter(run.state for run in runs)
    if len(counts) == 1:
        return runs[0].state
    return ", ".join(f"{count} {state}" for state, count in counts.most_common())


def _notes(runs: Sequence[Run], used: Sequence[Run]) -> list[str]:
    notes = [note for run in runs for note in run.notes]
    if used and used[0].state not in GOOD_STATES:
        notes.append("rate of a run that did not complete")
    left_out = sum(1 for run in runs if run.rate) - len(used)
    if left_out:
        notes.append(f"{left_out} with a rate but not completed left out of the median")
    rates = [run.rate for run in used if run.rate]
    notes += [
        f"outlier kept: {significant(rates[index], 1)} samples/s/GPU in {Path(used[index].source).name}"
        for index in outliers(rates)
    ]
    targets = [run.time_to_target_s for run in runs if run.time_to_target_s]
    if targets:
        low, high, coverage = median_interval(targets)
        kind = f"{95 if coverage >= 0.95 else round(100 * coverage)} % interval" if len(targets) > 1 else ""
        told = f", {low:.0f} to {high:.0f} s ({kind})" if kind else ""
        notes.append(f"target reached by {len(targets)} of {len(runs)} runs, after {median(targets):.0f} s{told}")
    notes += [
        f"{run.state}: {' '.join(run.error.split())[:120].replace(';', ',')}" for run in runs if run.error and run.state
    ]
    return list(dict.fromkeys(notes))


def differing_settings(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Settings (dotted names) whose values differ among run configurations, with the values found."""
    flat = [_flatten(config) for config in configs if config]
    names = sorted({name for values in flat for name in values if not name.startswith(IGNORED_SETTINGS)})
    found = {name: list(dict.fromkeys(str(values.get(name, "not set")) for values in flat)) for name in names}
    return {name: values for name, values in found.items() if len(values) > 1}


def _flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
