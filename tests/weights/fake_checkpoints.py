"""Create checkpoints with fake content."""

from pathlib import Path
from typing import Any

import safetensors.torch

from clap_ds.checkpoint import checkpoint_files
from clap_ds.checkpoint.checkpoint_files import Manifest
from clap_ds.model.clap import ClapModel
from clap_ds.weights.formats import to_safetensors

CONTENTS = {"state.safetensors": b"states" * 3000, "weights.safetensors": b"weights" * 1000}


def make_checkpoint(
    folder: Path,
    step: int,
    *,
    metrics: dict[str, float] | None = None,
    tokenizer: str | None = None,
    contents: dict[str, bytes] | None = None,
    **manifest_fields: Any,
) -> Path:
    """Create a checkpoint like `Checkpointer.save`, without an engine. Default `contents` depend on
    the step; `manifest_fields` are further ones."""
    contents = contents or {name: content + b"%d" % step for name, content in CONTENTS.items()}
    serial = 1 + max(
        (manifest.serial for manifest in checkpoint_files.read_all(folder).values()), default=0
    )
    fields = {
        "model": {},
        "engine": {},
        "tokenizer": tokenizer,
        "metrics": metrics or {},
        **manifest_fields,
    }
    with checkpoint_files.atomic_dir(folder, step) as draft:
        files = {
            name: checkpoint_files.write_file(draft / name, content)
            for name, content in contents.items()
        }
        manifest = Manifest(serial, step, files=files, **fields)
        checkpoint_files.write_file(draft / "manifest.json", manifest.to_json().encode())
    return folder / draft.name


def checkpoint_of(
    model: ClapModel,
    folder: Path,
    step: int = 1,
    tokenizer: str | Path | None = None,
    **manifest_fields: Any,
) -> Path:
    """Create a checkpoint with a model's weights and a tokenizer by name or from a folder."""
    contents = {
        "weights.safetensors": safetensors.torch.save(
            *to_safetensors(model.state_dict(), model.config)
        )
    }
    if isinstance(tokenizer, Path):
        contents |= {f"tokenizer/{file.name}": file.read_bytes() for file in tokenizer.iterdir()}
        tokenizer = "tokenizer"
    sizes = model.config.model_dump(mode="json")
    return make_checkpoint(
        folder, step, contents=contents, tokenizer=tokenizer, model=sizes, **manifest_fields
    )


def save_safetensors(model: ClapModel, path: Path) -> None:
    """Write a model's weights and sizes to a file, without a manifest."""
    path.write_bytes(safetensors.torch.save(*to_safetensors(model.state_dict(), model.config)))


def flip_bit(path: Path, position: int) -> None:
    """Flip one bit of a file."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)
