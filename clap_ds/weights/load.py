"""Weights to start from, or to export, whatever they are kept in: told apart by what lies at the path.

Reading and checking them is `clap_ds.weights.formats`'; going on with training from a checkpoint is `checkpoint`'s.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from clap_ds.config.model import ClapConfig
from clap_ds.weights import checkpoint_files
from clap_ds.weights import formats as weights
from clap_ds.weights.manifest import MANIFEST, DamagedError, Manifest

_PICKLES = (".pt", ".pth", ".bin", ".ckpt")


def warn(message: str) -> None:
    """One line to standard error."""
    print(f"warning: {message}", file=sys.stderr, flush=True)


def load_weights(
    path: str | Path, config: ClapConfig | None = None, *, warn: Callable[[str], None] = warn
) -> weights.Checkpoint:
    """The weights at a path.

    Args:
        path: one of this project's checkpoints, or the folder they lie in (its newest good one is taken); a file of
            `clap_ds.weights.formats.save_safetensors`; a folder that `transformers.ClapModel` loads; a LAION-CLAP .pt file.
        config: sizes to expect. A LAION file doesn't name its own and needs them; for the others, by default, their own.
        warn: told of damaged checkpoints that are passed over.

    Raises:
        ValueError: nothing there, none of these, damaged, or of another model.
    """
    path = Path(path)
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder")
    if path.is_file():
        return _load_file(path, config)
    if (path / "config.json").exists():
        if config is not None:
            # By its tensors alone a model with other attention heads would fit.
            check_same_model(path, weights.load_transformers(path).config, config)
        return weights.load_transformers(path, config)
    return _of(config, path, weights.load_safetensors(_checkpoint(path, warn) / checkpoint_files.WEIGHTS))


def _load_file(path: Path, config: ClapConfig | None) -> weights.Checkpoint:
    if path.suffix == ".safetensors":
        return _of(config, path, weights.load_safetensors(path))
    if path.suffix not in _PICKLES:
        raise ValueError(f"{path}: expected a .safetensors file, a LAION-CLAP {', '.join(_PICKLES)} file or a folder")
    if config is None:
        raise ValueError(f"{path}: a LAION-CLAP file doesn't name its model's sizes: give a preset too")
    return weights.load_laion(path, config)


def _checkpoint(path: Path, warn: Callable[[str], None]) -> Path:
    try:
        return checkpoint_files.find_checkpoint(path, warn)
    except DamagedError as error:
        raise ValueError(f"{error}; and no config.json of a transformers model") from error


def _of(config: ClapConfig | None, path: Path, found: weights.Checkpoint) -> weights.Checkpoint:
    if config is None:
        return found
    check_same_model(path, found.config, config)
    return weights.Checkpoint(config, found.state)


def locate(path: str | Path, *, warn: Callable[[str], None] = warn) -> Path:
    """The newest good checkpoint, where `path` is a folder of checkpoints; any other path as it is."""
    path = Path(path)
    if (
        not path.is_dir()
        or (path / MANIFEST).exists()
        or not any(checkpoint_files.is_name(name.name) for name in path.iterdir())
    ):
        return path
    return _checkpoint(path, warn)


def tokenizer_of(path: str | Path) -> str | None:
    """The tokenizer that the model in a checkpoint (its folder, or its safetensors file) was trained with, as
    `clap_ds.model.tokenizer.load_tokenizer` takes it: the copy in the checkpoint, or its hub name. None where nothing says.

    Raises:
        ValueError: the checkpoint is damaged.
    """
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    if not (folder / MANIFEST).exists():
        return None
    name = Manifest.read(folder).tokenizer
    return str(folder / name) if name == checkpoint_files.TOKENIZER else name


def check_same_model(where: object, theirs: ClapConfig, ours: ClapConfig) -> None:
    """Refuse weights of another model.

    Raises:
        ValueError: names both models and the sizes that differ.
    """
    differences = list(_differences(theirs.model_dump(), ours.model_dump()))
    if differences:
        shown = ", ".join(differences[:4]) + (f" and {len(differences) - 4} more" if len(differences) > 4 else "")
        raise ValueError(f"{where} holds model {theirs.name}, this run has {ours.name}: {shown}")


def _differences(theirs: dict[str, Any], ours: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in ours.items():
        if name in ("name", "hub_name", "layer_norm_eps"):  # weights of another model don't differ by these
            continue
        if isinstance(value, dict):
            yield from _differences(theirs[name], value, f"{prefix}{name}.")
        elif theirs[name] != value:
            yield f"{prefix}{name} is {theirs[name]} there, {value} here"
