"""Load weights of any supported format, detected from the path."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from clap_ds.checkpoint.checkpoint_files import (
    MANIFEST,
    RAW,
    TOKENIZER,
    WEIGHTS,
    CheckpointFolder,
    Manifest,
    find_checkpoint,
)
from clap_ds.checkpoint.remote import FILES_OF_A_MODEL, WEIGHT_FILES, find_weights
from clap_ds.config.arguments import find_field
from clap_ds.config.model import ClapConfig
from clap_ds.config.urls import is_remote
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


def load_weights(
    path: str | Path, config: ClapConfig | None = None, *, best: bool = False, raw: bool = False
) -> Checkpoint:
    """Load the weights at a path or URL.

    Args:
        path: one of
            - a checkpoint of this project, or a folder of them (the newest valid one);
            - a file of `clap_ds.weights.formats.to_safetensors`;
            - a folder for `transformers.ClapModel`, or its Hub id (cache first);
            - a file of LAION-CLAP, open_clip (or a folder for its `local-dir:`) or HTSAT.
        config: expected sizes (default: the weights' own).
        best: take a folder's best by `best_metric` instead of the newest.
        raw: take a `clap.train.ema_decay` checkpoint's raw weights.

    Raises:
        ValueError: missing, unsupported or damaged file, another model, or non-finite weights.
    """
    local_path = find_weights(path, best=best)
    # Of several checkpoints at a URL, only that one has been copied.
    best = best and not is_remote(str(path))
    path, weights = _read(local_path, config, best=best, raw=raw)
    state = weights.state
    if bad_tensors := [name for name in state if not state[name].isfinite().all()]:
        tensors = f"{len(bad_tensors)} of {len(state)} tensors ({some(bad_tensors)})"
        raise ValueError(f"{path}: NaN or infinity in {tensors}: use an earlier checkpoint")
    if config is None:
        if weights.config.open_clip:
            # The file names a model that open_clip would build.
            check_recorded(weights.config.name, path, "--preset")
        return replace(weights, path=str(path))
    # Tensors alone would fit other numbers of attention heads.
    check_same_model(path, weights.config, config)
    is_trusted = weights.trusts_tokenizer or weights.tokenizer in (None, config.text.hub_name)
    return replace(weights, path=str(path), config=config, trusts_tokenizer=is_trusted)


def _read(
    path: Path, config: ClapConfig | None, *, best: bool, raw: bool
) -> tuple[Path, Checkpoint]:
    """Read weights, and return them with the path of the checkpoint in a folder of several."""
    if path.is_file() and path.suffix in WEIGHT_FILES:
        return path, _read_file(path, config)
    if (path / "config.json").exists():
        return path, load_transformers(path)
    if (path / OPEN_CLIP_WEIGHTS).exists():
        return path, _read_open_clip_folder(path, config)
    if path.is_dir():
        checkpoint = find_checkpoint(path, best=best)
        return checkpoint.path, read_weights(checkpoint, raw=raw)
    if path.exists():
        raise ValueError(f"{path}: expected a folder or a file ({', '.join(WEIGHT_FILES)})")
    # A Hub id is ORGANIZATION/NAME.
    if len(path.parts) == 2 and path.suffix not in WEIGHT_FILES:
        return path, load_by_name(str(path), partial(_from_hub, path), field="weights", kind="CLAP")
    raise ValueError(
        f"{path}: no such file or folder; expected a folder or a file ({', '.join(WEIGHT_FILES)})"
    )


def read_weights(checkpoint: CheckpointFolder, *, raw: bool = False) -> Checkpoint:
    """Read a checkpoint's weights: their moving average if it has one, unless `raw`."""
    # Without a moving average, the only weights are raw.
    name = RAW if raw and RAW in checkpoint.manifest.files else WEIGHTS
    return _read_file(checkpoint.path / name, None, checkpoint.manifest)


def _read_file(
    path: Path, config: ClapConfig | None, manifest: Manifest | None = None
) -> Checkpoint:
    """Read a file of weights. `manifest`: its checkpoint's, if that has been read."""
    if path.suffix != ".safetensors":
        return from_state_dict(path, read_pickled(path), config)
    state, metadata = read_safetensors(path)
    # Other programs' files.
    if METADATA_KEY not in metadata:
        return from_state_dict(path, state, config)
    weights = from_safetensors(path, state, metadata)
    if manifest is None and (path.parent / MANIFEST).exists():
        manifest = Manifest.read(path.parent)
    return weights if manifest is None else _add_manifest(path, weights, manifest)


def _read_open_clip_folder(folder: Path, config: ClapConfig | None) -> Checkpoint:
    """Read a folder that open_clip loads as `local-dir:`."""
    weights = _read_file(folder / OPEN_CLIP_WEIGHTS, config)
    if (folder / "tokenizer_config.json").exists():
        # The user has named the folder.
        weights = replace(weights, tokenizer=str(folder), trusts_tokenizer=True)
    sizes = folder / "open_clip_config.json"
    if sizes.exists():
        context_length = flatten(read_object(sizes)).get("model_cfg.text_cfg.context_length")
        weights = replace(weights, context_length=context_length)
    return weights


def _from_hub(path: Path, local_files_only: bool) -> Checkpoint:
    folder = snapshot_download(
        str(path), local_files_only=local_files_only, allow_patterns=FILES_OF_A_MODEL
    )
    weights = load_transformers(folder)
    # The cache's folder is named by a commit.
    return replace(weights, config=weights.config.model_copy(update={"name": path.name}))


def _add_manifest(path: Path, weights: Checkpoint, manifest: Manifest) -> Checkpoint:
    """Add what the manifest next to a file of weights states."""
    reached = f"step {manifest.step:,}"
    # Metrics are of the averaged weights.
    score = manifest.metrics.get(manifest.best_metric or "")
    if score is not None and path.name != RAW:
        reached += f", {manifest.best_metric} {score:.4g}"
    if RAW in manifest.files and path.name == WEIGHTS:
        reached += ", moving average of the weights"
    # Settings are untrusted: fields of wrong types count as unknown.
    loss_kind = find_field(manifest.settings, "clap.loss.kind")
    if not isinstance(loss_kind, str):
        loss_kind = weights.loss_kind
    context_length = find_field(manifest.settings, "clap.context_length")
    if context_length is None:
        context_length = weights.context_length
    return replace(
        weights,
        tokenizer=manifest.tokenizer_in(path.parent),
        trusts_tokenizer=manifest.tokenizer == TOKENIZER,
        context_length=context_length,
        loss_kind=loss_kind,
        reached=reached,
    )


def check_same_model(source: object, recorded: ClapConfig, current: ClapConfig) -> None:
    """Raise ValueError with the sizes that differ."""
    # These don't affect whether weights fit.
    excluded: Any = {"name": True, "text": {"hub_name", "layer_norm_eps", "pad_token_id"}}
    sizes = recorded.model_dump(exclude=excluded)
    changes = differences(sizes, current.model_dump(exclude=excluded))
    if changes:
        raise ValueError(
            f"{source} contains model {recorded.name}, but this run uses {current.name}:"
            f" {some(changes)}"
        )


def differences(recorded: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """Describe how a checkpoint's values differ from this run's, for this run's fields."""
    recorded = flatten(recorded)
    current = flatten(current)
    return [
        f"{name} is {recorded.get(name)!r} there, {value!r} here"
        for name, value in current.items()
        if recorded.get(name) != value
    ]
