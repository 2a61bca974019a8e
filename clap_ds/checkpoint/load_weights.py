"""Load weights of any supported format, detected from the path."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from clap_ds.checkpoint.checkpoint_files import (
    MANIFEST,
    RAW,
    TOKENIZER,
    WEIGHTS,
    Manifest,
    find_checkpoint,
)
from clap_ds.config.arguments import find_field
from clap_ds.config.model import ClapConfig
from clap_ds.utils.errors import some
from clap_ds.utils.files import flatten, read_object
from clap_ds.weights.formats import (
    METADATA_KEY,
    Checkpoint,
    from_safetensors,
    load_transformers,
    read_safetensors,
)
from clap_ds.weights.hub import check_recorded, load_by_name
from clap_ds.weights.open_clip_weights import WEIGHTS as OPEN_CLIP_WEIGHTS
from clap_ds.weights.state_dicts import from_state_dict, read_pickled

_FILES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
_OF_A_MODEL = ["*.json", "*.txt", "model*.safetensors"]


def load_weights(
    path: str | Path, config: ClapConfig | None = None, *, best: bool = False, raw: bool = False
) -> Checkpoint:
    """Load the weights at a path.

    Args:
        path: a checkpoint of this project, or a folder of them (the newest good one); a file of
            `clap_ds.weights.formats.to_safetensors`; a folder for `transformers.ClapModel`, or its
              Hub id (cache
            first); a file of LAION-CLAP, open_clip (or a folder for its `local-dir:`) or HTSAT.
        config: expected sizes (default: the weights' own).
        best: take a folder's best by `best_metric` instead of the newest.
        raw: take a `clap.train.ema_decay` checkpoint's raw weights.

    Raises:
        ValueError: missing, unsupported or damaged file, another model, or non-finite weights.
    """
    path, found = _read(Path(path), config, best=best, raw=raw)
    if wrong := [name for name, tensor in found.state.items() if not tensor.isfinite().all()]:
        where = f"{len(wrong)} of {len(found.state)} tensors ({some(wrong)})"
        raise ValueError(f"{path}: NaN or infinity in {where}: use an earlier checkpoint")
    if config is not None:
        check_same_model(
            path, found.config, config
        )  # tensors alone would fit other numbers of attention heads
        is_trusted = found.trusts_tokenizer or found.tokenizer in (None, config.text.hub_name)
        found = replace(found, config=config, trusts_tokenizer=is_trusted)
    elif found.config.open_clip:
        check_recorded(found.config.name, path, "--preset")
    return replace(found, path=str(path))


def _read(
    path: Path, config: ClapConfig | None, *, best: bool, raw: bool
) -> tuple[Path, Checkpoint]:
    if path.is_file() and path.suffix in _FILES:
        state, metadata = (
            read_safetensors(path) if path.suffix == ".safetensors" else (read_pickled(path), {})
        )
        if METADATA_KEY in metadata:
            return path, _with_manifest(path, from_safetensors(path, state, metadata))
        return path, from_state_dict(path, state, config)
    if (path / "config.json").exists():
        return path, load_transformers(path)
    if (path / OPEN_CLIP_WEIGHTS).exists():
        _, found = _read(path / OPEN_CLIP_WEIGHTS, config, best=best, raw=raw)
        if (path / "tokenizer_config.json").exists():
            found = replace(found, tokenizer=str(path), trusts_tokenizer=True)
        sizes = path / "open_clip_config.json"
        if sizes.exists():
            found = replace(
                found,
                context_length=flatten(read_object(sizes)).get("model_cfg.text_cfg.context_length"),
            )
        return path, found
    if path.is_dir():
        path = find_checkpoint(path, best=best)
        file = path / (RAW if raw and (path / RAW).exists() else WEIGHTS)
        return path, _read(file, config, best=best, raw=raw)[1]
    if not path.exists() and len(path.parts) == 2 and path.suffix not in _FILES:
        return path, load_by_name(str(path), partial(_from_hub, path), field="weights", kind="CLAP")
    what = "expected" if path.exists() else "no such file or folder; expected"
    raise ValueError(f"{path}: {what} a folder or a file ({', '.join(_FILES)})")


def _from_hub(path: Path, local_files_only: bool) -> Checkpoint:
    from huggingface_hub import snapshot_download

    folder = snapshot_download(
        str(path), local_files_only=local_files_only, allow_patterns=_OF_A_MODEL
    )
    found = load_transformers(folder)
    return replace(found, config=found.config.model_copy(update={"name": path.name}))


def _with_manifest(path: Path, found: Checkpoint) -> Checkpoint:
    """Add the information of the manifest next to a file of weights."""
    folder = path.parent
    if not (folder / MANIFEST).exists():
        return found
    manifest = Manifest.read(folder)
    loss_kind = find_field(manifest.settings, "clap.loss.kind")
    tokens = find_field(manifest.settings, "clap.context_length")
    value = None if path.name == RAW else manifest.metrics.get(manifest.best_metric or "")
    reached = f"step {manifest.step:,}" + (
        "" if value is None else f", {manifest.best_metric} {value:.4g}"
    )
    reached += ", moving average of the weights" * (RAW in manifest.files and path.name == WEIGHTS)
    return replace(
        found,
        tokenizer=manifest.tokenizer_in(folder),
        trusts_tokenizer=manifest.tokenizer == TOKENIZER,
        context_length=found.context_length if tokens is None else tokens,
        loss_kind=loss_kind if isinstance(loss_kind, str) else found.loss_kind,
        reached=reached,
    )


def check_same_model(where: object, theirs: ClapConfig, ours: ClapConfig) -> None:
    """Raise ValueError with the sizes that differ."""
    aside: Any = {
        "name": True,
        "text": {"hub_name", "layer_norm_eps"},
    }  # these don't affect whether weights fit
    if found := differences(theirs.model_dump(exclude=aside), ours.model_dump(exclude=aside)):
        raise ValueError(
            f"{where} contains model {theirs.name}, but this run uses {ours.name}: {some(found)}"
        )


def differences(theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """Describe how a checkpoint's sizes differ from this run's."""
    found = flatten(theirs)
    expected = flatten(ours)
    differing = (name for name in expected if found.get(name) != expected[name])
    return [f"{name} is {found.get(name)!r} there, {expected[name]!r} here" for name in differing]
