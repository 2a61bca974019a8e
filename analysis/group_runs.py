"""Group runs into repeats and series. Repeats have the same configuration, code and hardware; a series is their scales.

Runs that differ in anything else form separate series, named by the difference (`gradient_sync=deepspeed`).
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from clap_ds.analysis.table import Run
from clap_ds.config.files import flatten

IGNORED_SETTINGS = (
    "clap.output.", "clap.seed", "clap.checkpoint.folder", "clap.checkpoint.remote_sync", "clap.train.resume",
    "steps_per_print", "train_batch_size", "train_micro_batch_size_per_gpu", "tensorboard.", "comms_logger.",
    "optimizer.params.lr", "scheduler.",
)  # fmt: skip
"""Settings that may differ between repeats: names, paths, seeds, the learning rate, and batches, which are compared
separately. Only the last part of a path counts."""
ACCUMULATION = "gradient_accumulation_steps"
BATCH, GLOBAL_BATCH = BATCHES = ("batch per GPU", "global batch")
"""Prefixes of the part of `variant` that names the batch that a series keeps constant, not a setting."""
_FOLDERS = re.compile(r'[^\s",\[]*/')


def split_series(runs: Sequence[Run]) -> list[Run]:
    """Fill in `scaling` and `variant`, which identify a series with model, GPU, precision and caption length."""
    groups: dict[tuple[object, ...], list[Run]] = defaultdict(list)
    of_series: dict[tuple[object, ...], str] = {}
    for run in runs:
        row = run.source, run.nodes, run.gpus, run.rate, run.batch_per_gpu
        if (
            of_series.setdefault(row, run.scaling) == run.scaling
        ):  # a table may list a run as weak and as strong scaling
            settings = ", ".join(part for part in run.variant.split(", ") if not part.startswith(BATCHES))  # of a table
            groups[run.model, run.device, run.precision, run.context_length or 0, settings].append(run)
    found = []
    for (*_, given), group in groups.items():
        for settings, alike in split_settings(group):
            parts = split_scaling(alike)
            for scaling, members in parts:
                batch = _batch_of(scaling, members[0]) if len(parts) > 1 else ""
                variant = ", ".join(str(part) for part in (given, settings, batch) if part)
                found += [replace(run, variant=variant, scaling=scaling) for run in members]
    return found


def _batch_of(scaling: str, run: Run) -> str:
    known = run.batch_per_gpu and global_batch(run)
    return f"{GLOBAL_BATCH} {known}" if scaling == "strong" else f"{BATCH} {run.batch_per_gpu or 'not stated'}"


def split_settings(group: Sequence[Run]) -> list[tuple[str, list[Run]]]:
    """Group runs of the same settings, code and hardware; name groups by as few differences as distinguish them."""
    import pandas as pd

    facts = pd.DataFrame([_facts(run) for run in group]).fillna("not recorded")
    facts = facts.loc[:, facts.nunique() > 1]
    scales = [(run.nodes, run.gpus, run.batch_per_gpu) for run in group]
    if ACCUMULATION in facts and len({*zip(scales, facts[ACCUMULATION], strict=True)}) == len({*scales}):
        facts = facts.drop(columns=ACCUMULATION)  # implied by the scale
    naming: list[str] = []
    told = 1
    for name in sorted(facts, key=lambda name: name.startswith("clap.bench.")):  # measurement settings matter least
        if (count := facts.groupby([*naming, name]).ngroups) > told:
            naming, told = [*naming, name], count
    titles = pd.Series([""] * len(group))
    for name in naming:
        titles += f", {name.removeprefix('clap.')}=" + facts[name].str[:40]
    return [(title[2:], [group[at] for at in places]) for title, places in titles.groupby(titles).indices.items()]


def _facts(run: Run) -> dict[str, str]:
    """Return settings, code and hardware as text by dotted names, settings first."""
    found = {name: value for name, value in flatten(run.config).items() if not name.startswith(IGNORED_SETTINGS)}
    found[ACCUMULATION] = run.accumulation
    known = {**(run.environment.get("versions") or {}), **run.environment}
    found |= {name: known[name] for name in ("clap_ds", "torch", "deepspeed", "cpu_kernels") if known.get(name)}
    if commit := str(known.get("git_commit") or ""):
        found["commit"] = commit[:12] + commit[40:]
    if devices := known.get("device_names"):
        found["devices"] = " and ".join(sorted(set(map(str, devices))))
    return {name: _FOLDERS.sub("", _text(value)) for name, value in found.items()}


def _text(value: object) -> str:
    return value.rstrip("/") if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def split_scaling(group: Sequence[Run]) -> list[tuple[str, list[Run]]]:
    """Split the runs of one model into weak and strong scaling: [("weak" | "strong" | "", runs), …].

    Runs of one batch per GPU are weak scaling; runs of one global batch at several scales are strong. In a mixture, every batch
    per GPU with several scales is weak scaling. The rest are strong scaling if their global batch has several scales, including
    runs of that global batch in a weak series.
    """
    import pandas as pd

    if len(known := {run.batch_per_gpu for run in group if run.batch_per_gpu}) < 2:  # a failed run may not state it
        return [("weak" if known else "", [replace(run, batch_per_gpu=max(known, default=None)) for run in group])]
    cells = [(run.batch_per_gpu, global_batch(run), run.gpus) for run in group]
    table = pd.DataFrame(cells, columns=["batch", "total", "gpus"])
    weak, has_scales = (table.groupby(by)["gpus"].transform("nunique") > 1 for by in ("batch", "total"))
    strong = has_scales & table["total"].isin(table["total"][~weak])
    found = []
    for scaling, chosen, by in (("weak", weak, "batch"), ("strong", strong, "total"), ("", ~(weak | strong), "batch")):
        for places in table[chosen].groupby(by, sort=False, dropna=False).groups.values():
            found.append((scaling, [group[place] for place in places]))
    return found


def global_batch(run: Run) -> int | None:
    return run.batch_per_gpu and run.batch_per_gpu * run.gpus
