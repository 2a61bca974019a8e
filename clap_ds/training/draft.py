"""A checkpoint being put together by rank 0, from the folder without a name to the one that has been read back.

DeepSpeed's file is written in between, by all ranks' call of its `save_checkpoint`.
"""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

import torch

from clap_ds.engine.engine import ClapEngine
from clap_ds.training import engine_state
from clap_ds.training.progress import Progress
from clap_ds.weights import checkpoint_files
from clap_ds.weights import formats as weights
from clap_ds.weights.checkpoint_files import TOKENIZER, WEIGHTS, write_file
from clap_ds.weights.manifest import FileRecord, Manifest

PROGRESS = "progress.json"
RANDOM_STATES = "random_states.pt"
_LATEST = "latest"
"""DeepSpeed's own pointer to its file, so that `load_checkpoint` of the folder does without a tag."""

_LARGEST_TOKENIZER_FILE = 64 * 2**20


def begin_draft(folder: Path, step: int) -> Path:
    """An empty folder for a new checkpoint.

    Raises:
        OSError: it can't be made.
    """
    draft = checkpoint_files.partial_of(folder, checkpoint_files.checkpoint_name(step, folder))
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    return draft


def complete_draft(
    draft: Path,
    deepspeed_files: engine_state.HashedFiles,
    engine: ClapEngine,
    progress: Progress,
    *,
    random_states: list[dict[str, Any]],
    metrics: dict[str, float],
    tokenizer: str | None,
) -> tuple[Path, Manifest]:
    """Write what DeepSpeed doesn't, read everything back, and give the checkpoint its name.

    Raises:
        OSError: the disk is full or failing, DeepSpeed's file included.
        DamagedError: what was read back isn't what was written.
    """
    if deepspeed_files.problem is not None:
        raise deepspeed_files.problem
    records = dict(deepspeed_files.records)
    records[_LATEST] = write_file(draft / _LATEST, engine_state.TAG.encode())
    records[PROGRESS] = write_file(draft / PROGRESS, progress.to_json().encode())
    buffer = io.BytesIO()
    torch.save(random_states, buffer)
    records[RANDOM_STATES] = write_file(draft / RANDOM_STATES, buffer.getvalue())
    exported = weights.to_safetensors(engine_state.master_weights(engine), engine.model.config)
    records[WEIGHTS] = write_file(draft / WEIGHTS, exported)
    del exported
    copied = _copy_tokenizer(tokenizer, draft)
    others, _ = checkpoint_files.read_all(draft.parent)
    manifest = Manifest(
        serial=checkpoint_files.next_serial(others.values()),
        step=progress.step,
        model=engine.model.config.model_dump(mode="json"),
        engine=engine_state.describe(engine),
        tokenizer=TOKENIZER if copied else tokenizer,
        metrics=metrics,
        files={**records, **copied},
    )
    return checkpoint_files.publish(draft, manifest), manifest


def _copy_tokenizer(tokenizer: str | None, draft: Path) -> dict[str, FileRecord]:
    """The files of a tokenizer that is a folder, so that the checkpoint does without it; a hub's has none here."""
    if tokenizer is None or not Path(tokenizer).is_dir():
        return {}
    (draft / TOKENIZER).mkdir()
    files = sorted(path for path in Path(tokenizer).iterdir() if path.is_file())
    return {
        f"{TOKENIZER}/{file.name}": write_file(draft / TOKENIZER / file.name, file.read_bytes())
        for file in files
        if file.stat().st_size <= _LARGEST_TOKENIZER_FILE
    }
