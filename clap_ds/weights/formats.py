"""Weights to and from other CLAPs: `transformers.ClapModel`, LAION-CLAP `.pt` files, and this project's own safetensors.

Every reader gives a `Checkpoint`, checked against the model's own names and shapes, so that what loads is complete. Nothing
is ever unpickled beyond plain tensors. Optimiser state and resuming a run belong to `clap_ds.training`. As a command,
`python -m clap_ds.weights.formats export CHECKPOINT DIR` is `clap_ds.weights.export`.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from clap_ds.config.model import ClapConfig
from clap_ds.model.clap import ClapModel
from clap_ds.model.swin import relative_position_index
from clap_ds.weights.hf_config import config_from_transformers, config_to_transformers, feature_extractor
from clap_ds.weights.names import State, from_names, laion_names, to_names, transformers_names

import transformers  # isort: skip  (after torchaudio_compat)

METADATA_KEY = "clap_ds.config"
HELD_PREFIXES = ("audio.tscam_conv.", "audio.head.")
"""The AudioSet classifier, which HF's CLAP leaves out."""
LOGIT_BIAS = "logit_bias"
"""Learned with the sigmoid loss; other CLAPs have none."""
_NOT_IN_OTHERS = (*HELD_PREFIXES, LOGIT_BIAS)

_LAION_IGNORED = (
    "audio_transform.",
    "text_transform.",
    "audio_branch.spectrogram_extractor.",
    "audio_branch.logmel_extractor.",
)
_CONSTANTS = (".relative_position_index", ".attn_mask", ".position_ids", ".token_type_ids")
"""Ends of names of constants that other CLAPs save as tensors."""

_NAMES_SHOWN = 5


@dataclass(frozen=True)
class Checkpoint:
    """A model's sizes and its state, in `ClapModel`'s names."""

    config: ClapConfig
    state: State

    def build(self, **options: Any) -> ClapModel:
        """A `ClapModel` with these weights; `options` are its keyword arguments."""
        model = ClapModel(self.config, **{"sigmoid": LOGIT_BIAS in self.state, **options})
        self.load_into(model)
        return model

    def load_into(self, model: ClapModel) -> None:
        """Copies the weights into a model of the same sizes, in the model's dtypes and on its devices.

        Tensors of the held AudioSet classifier and a logit bias that the checkpoint lacks stay as they are; a logit bias that
        the model lacks is left out.

        Raises:
            ValueError: the model has other names or shapes.
        """
        state = {
            name: value for name, value in self.state.items() if name != LOGIT_BIAS or model.logit_bias is not None
        }
        _check(state, model.state_dict(), f"a checkpoint of {self.config.name} doesn't fit {model.config.name}")
        model.load_state_dict(state, strict=False)


def load_transformers(source: str | Path | Mapping[str, Tensor], config: ClapConfig | None = None) -> Checkpoint:
    """Weights of a `transformers.ClapModel` without feature fusion.

    Args:
        source: a folder with `config.json` and safetensors (one file or sharded), or a state dict.
        config: sizes to expect; by default the folder's own.

    Raises:
        ValueError: no such files, a pickle only, feature fusion, or names and shapes that don't fit.
    """
    if isinstance(source, Mapping):
        if config is None:
            raise ValueError("a state dict alone doesn't say a CLAP's sizes: pass the config too")
        tensors, label = dict(source), "the state dict"
    else:
        folder, label = Path(source), str(source)
        config = config or _read_transformers_config(folder)
        tensors = _read_safetensors_folder(folder)
    if any("fusion_model" in name or "mel_conv2d" in name for name in tensors):
        raise ValueError(f"{label}: CLAP with feature fusion is not supported; use an unfused checkpoint")
    return _checkpoint(config, tensors, transformers_names, label)


def save_transformers(model: ClapModel, folder: str | Path) -> None:
    """Writes a folder that `transformers.ClapModel.from_pretrained` and `ClapFeatureExtractor.from_pretrained` load, in fp32.

    The held AudioSet classifier and the sigmoid loss's logit bias have no place there and are left out.

    Raises:
        ValueError: HF's ClapModel can't express this model; says why. `save_safetensors` can.
    """
    config = config_to_transformers(model.config)
    config.architectures = ["ClapModel"]
    config.dtype = torch.float32
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = _cpu({**to_transformers(model.state_dict()), **_transformers_constants(model.config)})
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    feature_extractor(model.config.audio).save_pretrained(folder)


def to_transformers(state: Mapping[str, Tensor]) -> State:
    """A `ClapModel` state in `transformers.ClapModel`'s names, floating tensors in fp32."""
    named = to_names({k: v for k, v in state.items() if not k.startswith(_NOT_IN_OTHERS)}, transformers_names)
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in named.items()}


def load_laion(source: str | Path | Mapping[str, Any], config: ClapConfig) -> Checkpoint:
    """Weights of a LAION-CLAP checkpoint without feature fusion.

    Args:
        source: a `.pt` file, or what it holds: a state dict, bare or under "state_dict", with or without a `module.` prefix.
        config: its sizes, which the file doesn't name.

    Raises:
        ValueError: not such a file, or names and shapes that don't fit.
    """
    label = "the state dict" if isinstance(source, Mapping) else str(source)
    content = source if isinstance(source, Mapping) else _read_pt(Path(source))
    content = content.get("state_dict", content)
    tensors = {
        name.removeprefix("module."): value
        for name, value in content.items()
        if isinstance(value, Tensor) and not name.removeprefix("module.").startswith(_LAION_IGNORED)
    }
    if any("fusion_model" in name or "mel_conv" in name for name in tensors):
        raise ValueError(f"{label}: LAION-CLAP with feature fusion is not supported; use an unfused checkpoint")
    return _checkpoint(config, tensors, laion_names, label)


def save_safetensors(model: ClapModel, path: str | Path) -> None:
    """Writes any `ClapModel`, the held classifier included, to one safetensors file that carries its sizes; dtypes are kept."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file(_cpu(model.state_dict()), path, metadata=_metadata(model.config))


def to_safetensors(state: Mapping[str, Tensor], config: ClapConfig) -> bytes:
    """What `save_safetensors` would write of a model in this state, dtypes kept."""
    return safetensors.torch.save(_cpu(state), metadata=_metadata(config))


def _metadata(config: ClapConfig) -> dict[str, str]:
    return {"format": "pt", METADATA_KEY: config.model_dump_json()}


def load_safetensors(path: str | Path) -> Checkpoint:
    """Reads what `save_safetensors` wrote.

    Raises:
        ValueError: no such file, not one of these, or names and shapes that don't fit its sizes.
    """
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, safetensors.SafetensorError) as error:
        raise ValueError(f"{path}: can't be read as safetensors: {error}") from error
    if METADATA_KEY not in metadata:
        raise ValueError(f"{path}: holds no {METADATA_KEY} metadata; only files of save_safetensors do")
    config = ClapConfig.model_validate_json(metadata[METADATA_KEY])
    expected = _expected(config, sigmoid=LOGIT_BIAS in state)
    _check(state, expected, f"{path} doesn't fit its own sizes ({config.name})")
    return Checkpoint(config, state)


def _checkpoint(
    config: ClapConfig, tensors: dict[str, Tensor], names: Callable[[str], list[str]], label: str
) -> Checkpoint:
    expected = _expected(config)
    state = from_names(expected, names, tensors)
    known = {name for key in expected for name in names(key)}
    unexpected = [name for name in tensors if name not in known and not name.endswith(_CONSTANTS)]
    missing = [name for key in _missing(state, expected) for name in names(key) if name not in tensors]
    _check(state, expected, f"{label} doesn't fit {config.name}", missing, unexpected)
    return Checkpoint(config, state)


def _expected(config: ClapConfig, *, sigmoid: bool = False) -> State:
    """The model's state on the meta device: names, shapes and dtypes without the numbers."""
    with torch.device("meta"):
        return ClapModel(config, sigmoid=sigmoid).state_dict()


def _missing(state: State, expected: Mapping[str, Tensor]) -> list[str]:
    return [key for key in expected if key not in state and not key.startswith(_NOT_IN_OTHERS)]


def _check(
    state: State,
    expected: Mapping[str, Tensor],
    complaint: str,
    missing: list[str] | None = None,
    unexpected: list[str] | None = None,
) -> None:
    """Refuses a state that isn't `expected`, the held classifier aside; `missing` and `unexpected` in the source's names."""
    if missing is None:
        missing = _missing(state, expected)
    if unexpected is None:
        unexpected = [key for key in state if key not in expected]
    misshapen = [
        f"{key} {tuple(tensor.shape)} instead of {tuple(expected[key].shape)}"
        for key, tensor in state.items()
        if key in expected and tensor.shape != expected[key].shape
    ]
    findings = [
        f"{kind}: {_some(names)}"
        for kind, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", misshapen))
        if names
    ]
    if findings:
        raise ValueError(f"{complaint}. " + ". ".join(findings))


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    rest = len(names) - _NAMES_SHOWN
    return f"{shown} and {rest} more" if rest > 0 else shown


def _cpu(tensors: Mapping[str, Tensor]) -> State:
    return {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}


def _transformers_constants(config: ClapConfig) -> State:
    """The constants `transformers.ClapModel` keeps among its weights."""
    state: State = {}
    for stage, (depth, grid) in enumerate(zip(config.audio.depths, config.audio.stage_grids, strict=True)):
        for block in range(depth):
            name = f"audio_model.audio_encoder.layers.{stage}.blocks.{block}.attention.self.relative_position_index"
            state[name] = relative_position_index(min(config.audio.attention_window, grid))
    positions = torch.arange(config.text.max_positions)[None]
    state["text_model.embeddings.position_ids"] = positions
    state["text_model.embeddings.token_type_ids"] = torch.zeros_like(positions)
    return state


def _read_transformers_config(folder: Path) -> ClapConfig:
    fields = _read_json(folder / "config.json")
    if fields.get("model_type") != "clap":
        raise ValueError(f"{folder}: config.json is of model_type {fields.get('model_type')!r}, expected 'clap'")
    front_end = folder / "preprocessor_config.json"
    return config_from_transformers(
        transformers.ClapConfig.from_dict(fields),
        _read_json(front_end) if front_end.exists() else None,
        name=folder.name,
    )


def _read_safetensors_folder(folder: Path) -> State:
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists():
        files = sorted({folder / name for name in _read_json(index)["weight_map"].values()})
    elif single.exists():
        files = [single]
    else:
        raise ValueError(
            f"{folder}: no model.safetensors or model.safetensors.index.json (pickled weights are not read)"
        )
    tensors: State = {}
    for file in files:
        try:
            tensors.update(safetensors.torch.load_file(file))
        except (OSError, safetensors.SafetensorError) as error:
            raise ValueError(f"{file}: can't be read as safetensors: {error}") from error
    return tensors


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: can't be read as JSON: {error}") from error


def _read_pt(path: Path) -> Mapping[str, Any]:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"{path}: can't be read as a checkpoint of plain tensors: {reason}") from error


if __name__ == "__main__":
    from clap_ds.weights.export import command

    command()
