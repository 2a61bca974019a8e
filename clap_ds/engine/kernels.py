"""Which kernels a run computes with where its settings leave that open (`auto`): on CUDA the quickest that is right, as tried
on this GPU at the run's own sizes (`kernel_trials`), once: what was found is kept in the user's cache. Rank 0 decides for all.

A run that resumes takes what its checkpoint says, so that its numbers go on as they began; where not all had been tried then,
it tries on. What fails here doesn't fail the run: a site of which nothing is known keeps the kernel to take untried.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, TypeAdapter
from torch.utils._triton import has_triton_package

from clap_ds.config.files import write_atomically
from clap_ds.config.places import PACKAGE
from clap_ds.config.sections import ModelSettings
from clap_ds.config.settings import RunSettings
from clap_ds.dist.agreement import on_first
from clap_ds.dist.progress import doing
from clap_ds.engine import kernel_trials
from clap_ds.engine.kernel_trials import AttentionSite, MlpSite, Site, first_line
from clap_ds.engine.trial_processes import Conditions, Found, try_kernels, untried
from clap_ds.model.clap import ClapModel
from clap_ds.model.kernel_choice import KernelChoice
from clap_ds.model.swin import Mlp, SwinBlock, WindowAttention
from clap_ds.native.library import cache_directory
from clap_ds.record.hardware import device_name
from clap_ds.record.schema import KernelRecord, SiteRecord

_CONTENT = TypeAdapter(dict[str, dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)] | str]])


def choose_kernels(
    run: RunSettings, model: ClapModel, device: torch.device, recorded: Mapping[str, Any]
) -> KernelRecord:
    """Give the model's modules the kernels to compute with, before anything has been traced or run. A collective.

    Args:
        recorded: what the checkpoint says that the run resumes from; empty without one.

    Returns:
        What was chosen and why, for the run's record and its checkpoints; empty where there is nothing to choose.

    Raises:
        ValueError: this rank doesn't have what rank 0 has chosen.
    """
    sites = sites_of(model, run.clap.model)
    if not sites:
        return {}
    with doing("trying kernels"):
        record = on_first(lambda: _decide(list(sites), Conditions.of(run, device), recorded))
    for site, modules in sites.items():
        if (chosen := record.get("sites", {}).get(str(site))) is None:
            continue
        if (kernel := _by_name(site).get(chosen["kernel"])) is None:
            name = f"{chosen['kernel']} for {site}"
            raise ValueError(f"clap.model: attention, mlp: 'auto' on rank 0 is {name}, which this rank doesn't have")
        for module in modules:
            module.kernel = kernel
    return record


def sites_of(model: ClapModel, settings: ModelSettings) -> dict[Site, list[WindowAttention | Mlp]]:
    """What the settings leave open, and the modules that compute it."""
    sites: dict[Site, list[WindowAttention | Mlp]] = {}
    for stage, grid in zip(model.audio.stages, model.config.audio.stage_grids, strict=True):
        for block in [module for module in stage.modules() if isinstance(module, SwinBlock)]:
            attention, heads = block.attention, block.attention.relative_position_bias.shape[1]
            dim, hidden = block.mlp.fc1.in_features, block.mlp.fc1.out_features
            if settings.attention == "auto":
                site = AttentionSite(grid, attention.window, block.shift, heads, dim)
                sites.setdefault(site, []).append(attention)
            if settings.mlp == "auto":
                sites.setdefault(MlpSite(grid, dim, hidden // dim), []).append(block.mlp)
    return sites


def _by_name(site: Site) -> dict[str, KernelChoice]:
    return {str(kernel): kernel for kernel in site.candidates()}


def _decide(sites: Sequence[Site], conditions: Conditions, recorded: Mapping[str, Any]) -> KernelRecord:
    device, began_s = device_name(conditions.device), time.monotonic()
    taken: dict[str, SiteRecord] = {}
    if recorded and (problem := _why_not(recorded, sites, device)):
        print(f"note: the kernels that the checkpoint was trained with: {problem}; chosen anew", flush=True)
    elif recorded:
        taken = {name: found for name, found in recorded["sites"].items() if not found.get("untried")}
    undecided = [site for site in sites if str(site) not in taken and len(site.candidates()) > 1]
    if not undecided and not taken:
        return {}
    cache, problem = cache_directory() / "kernels.json", None
    keys = {site: _key(site, conditions, device) for site in undecided}
    content = _cached(cache) if undecided else {}
    known: dict[Site, Found] = {site: dict(content.get(key, {})) for site, key in keys.items()}
    if is_new := any(untried(site, found) for site, found in known.items()):
        problem = try_kernels(known, conditions)
        _write(cache, {keys[site]: found for site, found in known.items() if found})
    record = KernelRecord(
        device=device,
        source="tried" if is_new else "cache" if undecided else "checkpoint",
        seconds=time.monotonic() - began_s,
        sites=taken | {str(site): _best(site, found) for site, found in known.items()},
    )
    _show(record, sites, conditions, problem)
    return record


def _why_not(recorded: Mapping[str, Any], sites: Sequence[Site], device: str) -> str | None:
    """Why what a checkpoint says can't be taken, None where it can."""
    if recorded["device"] != device:
        return f"they were chosen on {recorded['device']}, this is {device}"
    for site in sites:
        label, kernels = recorded["sites"].get(str(site), {}).get("kernel"), _by_name(site)
        if label is not None and label not in kernels:
            return f"{label} for {site} can't be had here"
        if label is None and len(kernels) > 1:
            return f"there is none for {site}"
    return None


def _best(site: Site, found: Found) -> SiteRecord:
    """The quickest; the one to take untried where none is known to be right."""
    kernels = list(_by_name(site))
    ms = {name: 1000 * time_s for name in kernels if isinstance(time_s := found.get(name), float)}
    problems = {name: problem for name in kernels if isinstance(problem := found.get(name), str)}
    kernel = min(ms, key=ms.__getitem__, default=kernels[0])
    return SiteRecord(kernel=kernel, ms=ms, problems=problems, untried=untried(site, found))


def _show(record: KernelRecord, sites: Sequence[Site], conditions: Conditions, problem: str | None) -> None:
    """One line: for each site the kernel and its time, beside that of the one to take untried."""
    known_from = {"cache": "tried before", "checkpoint": "as in the checkpoint"}
    source = known_from.get(record["source"], f"tried in {record['seconds']:.0f} s")
    shown, wrong = [], []
    for site, found in ((site, record["sites"][str(site)]) for site in sites if str(site) in record["sites"]):
        names = dict.fromkeys((found["kernel"], str(site.candidates()[0])))
        times = [f"{name} {found['ms'][name]:.2f}" for name in names if name in found["ms"]]
        shown.append(f"{site}: {', '.join(times) or found['kernel']}")
        wrong += [f"{name} at {site}: {why}" for name, why in found["problems"].items()]
    more = [f"{len(wrong)} can't be taken ({wrong[0]})"] if wrong else []
    more += [f"not all have been tried ({problem})"] if problem else []
    head = f"kernels on {record['device']}, {conditions}, {source} (ms forward + backward)"
    print(f"{head}: {'; '.join([*shown, *more])}", flush=True)


def _key(site: Site, conditions: Conditions, device: str) -> str:
    """All that an outcome depends on."""
    version = importlib.import_module("triton").__version__ if has_triton_package() else "none"
    return f"{device}; torch {torch.__version__}; triton {version}; kernels {_source()}; {conditions}; {site}"


@functools.cache
def _source() -> str:
    """Hash of what computes here and of what tries it."""
    model = PACKAGE / "model"
    files = sorted(
        {*model.glob("*window*.py"), *model.glob("*triton*.py"), model / "swin.py", model / "kernel_choice.py"}
    )
    parts = [path.read_bytes() for path in [*files, Path(kernel_trials.__file__)]]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _read(path: Path) -> dict[str, Found]:
    return dict(_CONTENT.validate_json(path.read_bytes(), strict=True)) if path.exists() else {}


def _cached(path: Path) -> dict[str, Found]:
    try:
        return _read(path)
    except (OSError, ValueError) as error:
        print(f"note: {path} can't be read ({first_line(error)}): kernels are tried anew", flush=True)
        return {}


def _write(path: Path, entries: Mapping[str, Found]) -> None:
    """Beside what other runs have written there, unless it can't be read."""
    others: dict[str, Found] = {}
    try:
        with suppress(OSError, ValueError):
            others = _read(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({**others, **entries}, indent=1) + "\n")
    except OSError as error:
        print(f"note: {path} can't be written ({first_line(error)}): the next run tries kernels anew", flush=True)
