"""Group runs into repeats and series. Repeats have the same configuration, code and hardware; a
series is their scales.

Runs that differ in anything else form separate series, named by the difference
(`gradient_sync=deepspeed`).
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from clap_ds.analysis.table import Run
from clap_ds.config.files import flatten

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
