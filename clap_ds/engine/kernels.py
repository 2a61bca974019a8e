"""Which kernels a run computes with where its settings leave that open (`auto`): on CUDA the quickest that is right, as tried
on this GPU at the run's own sizes (`kernel_trials`), once: what was found is kept in the user's cache. Rank 0 decides for all.

A run that resumes takes what its checkpoint says, so that its numbers go on as they began. What fails here doesn't fail the
run: a site of which nothing is known keeps the kernel to take untried.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
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
from clap_ds.engine.kernel_trials import AttentionSite, MlpSite, Site, first_line, to_json
from clap_ds.engine.trial_processes import Crew
from clap_ds.model.clap import ClapModel
from clap_ds.model.kernel_choice import KernelChoice
from clap_ds.model.swin import Mlp, SwinBlock, WindowAttention
from clap_ds.native.library import cache_directory
from clap_ds.record.hardware import device_name
from clap_ds.record.schema import KernelRecord, SiteRecord

TIME_LIMIT_S = 27.0
CHECKING_SHARE = 0.65
"""Of the time limit: what is known to be right by then is timed."""
ANSWER_LIMIT_S = 12.0
"""For each: a backward kernel takes a few seconds to compile."""
MOST_CHILDREN = 8
BYTES_OF_A_CHILD = 2**30
"""On the GPU before any tensor."""
TENSORS_OF_A_TRIAL = 6
"""Memory of a trial, in tensors as large as an MLP's hidden layer, 4 times its input."""

Found = dict[str, float | str]
"""By kernel: seconds, or what is wrong with it."""
_CONTENT = TypeAdapter(dict[str, dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)] | str]])


@dataclass(frozen=True)
class Conditions:
    """What a trial's outcome depends on beside the site."""

    device: torch.device
    dtype: torch.dtype
    clips: int

    @classmethod
    def of(cls, run: RunSettings, device: torch.device) -> Conditions:
        """The run's micro-batch, and the dtype its modules compute in."""
        name = run.precision.removeprefix("torch_autocast_")
        dtype = getattr(torch, {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(name, name))
        return cls(device, dtype, run.micro_batch)

    def __str__(self) -> str:
        return f"{self.clips} clips, {str(self.dtype).removeprefix('torch.')}"


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
    if recorded:
        problem = _why_not(recorded, sites, device)
        if problem is None:
            record = KernelRecord(device=device, source="checkpoint", seconds=0.0, sites=recorded["sites"])
            _show(record, sites, conditions, None)
            return record
        print(f"note: the kernels that the checkpoint was trained with: {problem}; chosen anew", flush=True)
    sites = [site for site in sites if len(site.candidates()) > 1]
    if not sites:
        return {}
    cache = cache_directory() / "kernels.json"
    keys = {site: _key(site, conditions, device) for site in sites}
    content = _cached(cache)
    known: dict[Site, Found] = {site: dict(content.get(key, {})) for site, key in keys.items()}
    problem = None
    if is_new := not _is_complete(known):
        problem = try_kernels(known, conditions)
        _write(cache, {keys[site]: found for site, found in _lasting(known).items() if found})
    record = KernelRecord(
        device=device,
        source="tried" if is_new else "cache",
        seconds=time.monotonic() - began_s,
        sites={str(site): _best(site, known[site]) for site in sites},
    )
    _show(record, sites, conditions, problem)
    return record


def _lasting(known: Mapping[Site, Found]) -> Mapping[Site, Found]:
    """What the next run need not find out again: where only kernels to take untried run, the others may lack something that
    will be there then, such as a C compiler."""
    if any(isinstance(found.get(name), float) for site, found in known.items() for name in list(_by_name(site))[1:]):
        return known
    return {site: {name: it for name, it in found.items() if isinstance(it, float)} for site, found in known.items()}


def _is_complete(known: Mapping[Site, Found]) -> bool:
    return all(_by_name(site).keys() <= found.keys() for site, found in known.items())


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
    return SiteRecord(kernel=min(ms, key=ms.__getitem__, default=kernels[0]), ms=ms, problems=problems)


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


def try_kernels(known: dict[Site, Found], conditions: Conditions) -> str | None:
    """Add what can be found out in `TIME_LIMIT_S` to what is known; gives back what stood in the way of knowing all.

    Kernels are compiled and compared by several processes at a time, and timed by one alone, which gets ready meanwhile;
    first of each site the one to take untried, then a second of each, and so on.
    """
    until_s = time.monotonic() + TIME_LIMIT_S
    rows = itertools.zip_longest(*([(site, kernel) for kernel in _by_name(site)] for site in known))
    pairs = [pair for row in rows for pair in row if pair is not None and pair[1] not in known[pair[0]]]
    problems: list[str] = []

    def ask(crew: Crew, what: str, number_at_a_time: int, until_s: float) -> list[int]:
        """Numbers of the pairs that have no problem, after noting what was found."""
        questions = [{"site": to_json(site), "kernel": name, "what": what} for site, name in pairs]
        answers = crew.ask(questions, num_children=number_at_a_time, limit_s=ANSWER_LIMIT_S, until_s=until_s)
        for number, answer in answers.items():
            site, name = pairs[number]
            if answer.get("passing"):
                problems.append(f"{name} at {site}: {answer['problem']}")
            elif found := answer.get("problem", answer.get("seconds")):
                known[site][name] = found
        return sorted(number for number, answer in answers.items() if "problem" not in answer)

    with Crew(_command(conditions), _environment()) as timing:
        timing.prepare(1)
        with Crew(_command(conditions), _environment()) as checking:
            check_until_s = until_s - (1 - CHECKING_SHARE) * TIME_LIMIT_S
            right = ask(checking, "check", _num_children(known, conditions), check_until_s)
        pairs = [pairs[number] for number in right]
        ask(timing, "time", 1, until_s)
    if _is_complete(known):
        return None
    return next(iter(problems), checking.problem or timing.problem or f"{TIME_LIMIT_S:g} s were over")


def _command(conditions: Conditions) -> list[str]:
    dtype = str(conditions.dtype).removeprefix("torch.")
    setup = json.dumps({"device": str(conditions.device), "dtype": dtype, "clips": conditions.clips})
    return [sys.executable, "-P", "-m", kernel_trials.__name__, setup]


def _environment() -> dict[str, str]:
    """With this package where the child looks first, wherever it was found."""
    path = os.pathsep.join([str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path}


def _num_children(sites: Mapping[Site, Any], conditions: Conditions) -> int:
    """As many as have a core and, on the GPU, memory."""
    if conditions.device.type != "cuda":
        return 1
    hidden = max(4 * site.dim * site.grid**2 for site in sites) * conditions.clips * conditions.dtype.itemsize
    free, _ = torch.cuda.mem_get_info(conditions.device)
    room = (free - BYTES_OF_A_CHILD) // (BYTES_OF_A_CHILD + TENSORS_OF_A_TRIAL * hidden)  # one waits to time them
    return max(1, min(MOST_CHILDREN, len(os.sched_getaffinity(0)), room))


def _key(site: Site, conditions: Conditions, device: str) -> str:
    """All that an outcome depends on."""
    version = importlib.import_module("triton").__version__ if has_triton_package() else "none"
    return f"{device}; torch {torch.__version__}; triton {version}; kernels {_source()}; {conditions}; {site}"


def _source() -> str:
    """Hash of what computes here and of what tries it."""
    files = sorted({*(PACKAGE / "model").glob("*window*.py"), *(PACKAGE / "model").glob("*triton*.py")})
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
