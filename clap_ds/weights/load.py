"""Weights to start from, to evaluate or to export, whatever they are kept in: told apart by what lies at the path.

Reading and checking them is `clap_ds.weights.formats`'; resuming training from a checkpoint is `clap_ds.training.checkpoint`'s.
"""

from pathlib import Path
from typing import Any

from clap_ds.config.model import ClapConfig
from clap_ds.weights import checkpoint_files as files
from clap_ds.weights.checkpoint_files import MANIFEST, TOKENIZER, WEIGHTS
from clap_ds.weights.formats import Checkpoint, load_laion, load_safetensors, load_transformers, some

_PICKLES = (".pt", ".pth", ".bin", ".ckpt")


def load_weights(path: str | Path, config: ClapConfig | None = None) -> Checkpoint:
    """The weights at a path.

    Args:
        path: one of this project's checkpoints, or the folder they lie in (its newest good one is taken); a file of
            `clap_ds.weights.formats.save_safetensors`; a folder that `transformers.ClapModel` loads; a LAION-CLAP .pt file.
        config: sizes to expect. A LAION file doesn't name its own and needs them; for the others, by default, their own.

    Raises:
        ValueError: nothing there, none of these, damaged, of another model, or not finite.
    """
    found = _load(Path(path), config)
    wrong = [name for name, tensor in found.state.items() if not tensor.isfinite().all()]
    if wrong:
        remedy = "a run that diverged, most likely: take an earlier checkpoint"
        raise ValueError(f"{path}: NaN or infinity in {len(wrong)} of {len(found.state)} tensors ({some(wrong)}): {remedy}")
    return found


def _load(path: Path, config: ClapConfig | None) -> Checkpoint:
    if path.is_file() and path.suffix in _PICKLES:
        if config is None:
            raise ValueError(f"{path}: a LAION-CLAP file doesn't name its model's sizes: give a preset too")
        return load_laion(path, config)
    found = _load_with_sizes(path)
    if config is None:
        return found
    check_same_model(path, found.config, config)  # by tensors alone a model with other attention heads would fit
    return Checkpoint(config, found.state)


def _load_with_sizes(path: Path) -> Checkpoint:
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder")
    if (path / "config.json").exists():
        return load_transformers(path)
    if path.is_dir():
        try:
            return load_safetensors(files.find_checkpoint(path) / WEIGHTS)
        except files.DamagedError as error:
            raise ValueError(f"{error}; and no config.json of a transformers model") from error
    if path.suffix == ".safetensors":
        return load_safetensors(path)
    raise ValueError(f"{path}: expected a .safetensors file, a LAION-CLAP {', '.join(_PICKLES)} file or a folder")


def locate(path: str | Path) -> Path:
    """The newest good checkpoint, where `path` is a folder of checkpoints; any other path as it is."""
    path = Path(path)
    return files.find_checkpoint(path) if not (path / MANIFEST).exists() and files.read_all(path) else path


def tokenizer_of(path: str | Path) -> str | None:
    """The tokenizer that the model in a checkpoint (its folder, or its safetensors file) was trained with, as
    `clap_ds.model.tokenizer.load_tokenizer` takes it: the copy in the checkpoint, or its hub name. None where nothing says;
    raises ValueError for a damaged checkpoint."""
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    if not (folder / MANIFEST).exists():
        return None
    name = files.Manifest.read(folder).tokenizer
    return str(folder / name) if name == TOKENIZER else name


def check_same_model(where: object, theirs: ClapConfig, ours: ClapConfig) -> None:
    """Refuse weights of another model; raises ValueError with both models and the sizes that differ."""
    aside: Any = {"name": True, "text": {"hub_name", "layer_norm_eps"}}  # weights fit whatever these are
    found = differences(theirs.model_dump(exclude=aside), ours.model_dump(exclude=aside))
    if found:
        raise ValueError(f"{where} holds model {theirs.name}, this run has {ours.name}: {some(found)}")


def differences(theirs: dict[str, Any], ours: dict[str, Any], prefix: str = "") -> list[str]:
    """In words, what a checkpoint has otherwise than this run."""
    found = []
    for name, value in ours.items():
        if isinstance(value, dict):
            found += differences(theirs[name], value, f"{prefix}{name}.")
        elif theirs.get(name) != value:
            found.append(f"{prefix}{name} is {theirs.get(name)!r} there, {value!r} here")
    return found
