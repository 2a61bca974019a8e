"""Weights to start from, to evaluate or to export, whatever they are kept in: told apart by what lies at the path.

Reading and checking them is `clap_ds.weights.formats`'; resuming training from a checkpoint is `clap_ds.training.checkpoint`'s.
"""

from pathlib import Path
from typing import Any

from clap_ds.config.model import ClapConfig
from clap_ds.weights import checkpoint_files as files
from clap_ds.weights.checkpoint_files import MANIFEST, TOKENIZER, WEIGHTS, Manifest
from clap_ds.weights.formats import (
    LOGIT_BIAS,
    Checkpoint,
    load_safetensors,
    load_transformers,
    read_json,
    some,
    trained_text_tokens,
)
from clap_ds.weights.laion import load_laion

_TOKENIZER_CONFIG = "tokenizer_config.json"
_PICKLES = (".pt", ".pth", ".bin", ".ckpt")


def load_weights(path: str | Path, config: ClapConfig | None = None) -> Checkpoint:
    """The weights at a path.

    Args:
        path: one of this project's checkpoints, or the folder they lie in (its newest good one is taken); a file of
            `clap_ds.weights.formats.save_safetensors`; a folder that `transformers.ClapModel` loads; a LAION-CLAP .pt file.
        config: sizes to expect; by default their own, which a LAION file doesn't name: those that its tensors have.

    Raises:
        ValueError: nothing there, none of these, damaged, of another model, or not finite.
    """
    found = _load(Path(path), config)
    wrong = [name for name, tensor in found.state.items() if not tensor.isfinite().all()]
    if wrong:
        remedy = "a run that diverged, most likely: take an earlier checkpoint"
        raise ValueError(
            f"{path}: NaN or infinity in {len(wrong)} of {len(found.state)} tensors ({some(wrong)}): {remedy}"
        )
    return found


def _load(path: Path, config: ClapConfig | None) -> Checkpoint:
    if path.is_file() and path.suffix in _PICKLES:
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


def locate(path: str | Path, *, best: bool = False) -> Path:
    """The newest good checkpoint, or the best, where `path` is a folder of checkpoints; any other path as it is.

    Raises:
        ValueError: no checkpoint is good; the best was asked for and can't be told.
    """
    path = Path(path)
    manifests = {} if (path / MANIFEST).exists() else files.read_all(path)
    if best:
        return _best(path, manifests)
    return files.find_checkpoint(path) if manifests else path


def _best(path: Path, manifests: dict[str, Manifest]) -> Path:
    metrics = sorted({manifest.best_by for manifest in manifests.values() if manifest.best_by})
    ranked = files.best(manifests, metrics[0]) if len(metrics) == 1 else []
    if (good := files.first_good(path, ranked, {})) is not None:
        return good
    if not manifests:
        why = "this isn't a folder of checkpoints"
    elif len(metrics) != 1:
        why = f"they name {' and '.join(metrics) or 'no metric'} to tell it by"
    else:
        why = f"none that is whole was evaluated by {metrics[0]}"
    raise ValueError(f"{path}: which checkpoint is best can't be told: {why}; give one's own path, or take the newest")


def taken(path: Path) -> str:
    """A checkpoint's path with its step and what it reached, by the metric that tells its run's best; other paths alone."""
    if (manifest := _manifest(path)) is None:
        return str(path)
    value = manifest.metrics.get(manifest.best_by or "")
    return f"{path}, step {manifest.step:,}" + ("" if value is None else f", {manifest.best_by} {value:.4g}")


def tokenizer_of(path: str | Path) -> str | None:
    """The tokenizer that a model was trained with, as `clap_ds.model.tokenizer.load_tokenizer` takes it: the copy in the
    checkpoint, its hub name, or that beside a transformers model. None where nothing says; raises ValueError for a damaged
    checkpoint."""
    manifest = _manifest(path)
    if manifest is not None:
        return str(_folder(path) / TOKENIZER) if manifest.tokenizer == TOKENIZER else manifest.tokenizer
    return str(path) if (Path(path) / _TOKENIZER_CONFIG).exists() else None


def loss_kind_of(path: str | Path, weights: Checkpoint) -> str:
    """The `clap.loss.kind` that a model was trained with: the checkpoint's, or where nothing says, told by its logit bias."""
    manifest = _manifest(path)
    kind = manifest.settings.get("clap", {}).get("loss", {}).get("kind") if manifest is not None else None
    return kind or ("sigmoid" if LOGIT_BIAS in weights.state else "softmax")


def text_tokens_of(path: str | Path, config: ClapConfig) -> int | None:
    """The caption length that a model of these sizes was trained with: the checkpoint's, a safetensors file's, or where the
    tokenizer beside a transformers model cuts captions, if that is short of the model's positions. None where nothing says."""
    manifest, beside = _manifest(path), Path(path) / _TOKENIZER_CONFIG
    if manifest is not None:
        tokens: int | None = manifest.settings.get("clap", {}).get("text_tokens")
        return tokens
    if beside.exists():
        limit = read_json(beside).get("model_max_length")
        return limit if isinstance(limit, int) and 2 <= limit < config.text.max_tokens else None
    return trained_text_tokens(Path(path)) if Path(path).suffix == ".safetensors" else None


def _folder(path: str | Path) -> Path:
    return Path(path) if Path(path).is_dir() else Path(path).parent


def _manifest(path: str | Path) -> Manifest | None:
    """Of the checkpoint at a path: its folder, or the weights in it."""
    folder = _folder(path)
    return Manifest.read(folder) if (folder / MANIFEST).exists() else None


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
