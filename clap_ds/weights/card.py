"""A model card for the Hugging Face hub, of what a checkpoint's manifest and its run's records say, and of nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from clap_ds.config.errors import UserError
from clap_ds.config.files import flatten, read_object
from clap_ds.config.metrics import TRAIN_LOSS
from clap_ds.config.places import VERSION
from clap_ds.config.secrets import redacted_all
from clap_ds.weights.checkpoint_files import AVERAGE, MANIFEST, RAW, Manifest
from clap_ds.weights.formats import Checkpoint

SECTIONS = ("clap.data", "clap.loss", "clap.train", "clap.model", "optimizer", "scheduler")
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
SINGLE = (*_BATCH, "bf16.enabled", "fp16.enabled")
OF_RUN = ("state", "samples", "epoch", "train_s", "global_batch", "precision", "world_size", "device_name", "finished")
OF_PLACE = ("num_nodes", "cuda", "git_commit", "versions.torch", "versions.deepspeed", "versions.transformers")


def model_card(found: Checkpoint, remarks: list[str], run: Path | None = None) -> str:
    """The text of a README.md.

    Args:
        found: the exported weights; the manifest beside them is read where there is one.
        remarks: what whoever uses the export should know.
        run: directory of the run, whose `summary.json` and `environment.json` are read.

    Raises:
        UserError: there is no such record, or it can't be read. ValueError: the manifest is damaged.
    """
    path = Path(found.path)
    folder = path if path.is_dir() else path.parent
    manifest = Manifest.read(folder) if (folder / MANIFEST).exists() else None
    tables: dict[str, Mapping[str, Any]] = {"Model": _portable(found.config.model_dump(mode="json"))}
    if manifest:
        settings = flatten(_portable(redacted_all(manifest.settings)))
        told = {name: value for name, value in settings.items() if name in SINGLE or name.startswith(SECTIONS)}
        tables |= {"Training": {"step": manifest.step, **told}}
        if RAW not in manifest.files or found.reached.endswith(AVERAGE):  # else they are the average's
            tables |= {"Evaluation at that step": {k: v for k, v in manifest.metrics.items() if k != TRAIN_LOSS}}
    if run is not None:
        records = [run / name for name in ("summary.json", "environment.json")]
        if not any(record.exists() for record in records):
            raise UserError(f"--run {run}: no summary.json or environment.json there; expected the directory of a run")
        summary, environment = (flatten(read_object(each)) if each.exists() else {} for each in records)
        last = {name: value for name, value in summary.items() if name in OF_RUN}
        tables["The run that trained it, at its end"] = last | {k: v for k, v in environment.items() if k in OF_PLACE}
    kind: Any = {"library_name": "transformers", "pipeline_tag": "zero-shot-audio-classification", "tags": ["clap"]}
    return f"---\n{ModelCardData(**kind).to_yaml()}\n---\n\n" + "\n".join(_lines(found, tables, remarks)) + "\n"


def _lines(found: Checkpoint, tables: Mapping[str, Mapping[str, Any]], remarks: list[str]) -> Iterator[str]:
    yield f"# {_plain(found.config.name)}\n\nA CLAP (contrastive language–audio pretraining) model, by clap-ds {VERSION}.\n"
    yield "```python\nfrom transformers import ClapModel, ClapProcessor\n"
    yield 'model, processor = ClapModel.from_pretrained("."), ClapProcessor.from_pretrained(".")\n```\n'
    yield 'Or, with clap-ds: `clap_ds.load(".")`. In place of `.` stands this folder or its name on the hub.\n'
    yield "## Limits\n\n" + "\n".join(f"- {_plain(remark)}" for remark in remarks) + "\n"
    for title, values in tables.items():
        rows = [f"| {_plain(k)} | {_plain(v)} |" for k, v in flatten(redacted_all(values)).items() if v is not None]
        if rows:
            yield "\n".join([f"## {title}\n", "| | |", "|---|---|", *rows, ""])


def _portable(value: Any) -> Any:
    """Without this machine's folders: of absolute paths, and those that begin with `~` or `..`, the last part alone; names that
    are then equal are numbered."""
    if isinstance(value, Mapping):
        short = [*map(_portable, value)]
        names = [name if short.count(name) == 1 else f"{n} {name}" for n, name in enumerate(short, 1)]
        return dict(zip(names, map(_portable, value.values()), strict=True))
    if isinstance(value, list | tuple):
        return [*map(_portable, value)]
    is_local = isinstance(value, str) and re.match(r"(file:/*)?[/~]|\.\.", value)
    return value.rstrip("/").rpartition("/")[2] if is_local else value


def _plain(value: Any) -> str:
    """Text that Markdown shows as it is, on one line."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    text = "".join(each if each.isprintable() else " " for each in text)
    return re.sub(r"([\\`*_{}\[\]<>|#~&!$])", r"\\\1", text)
