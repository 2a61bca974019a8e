"""Read and write weights as `transformers.ClapModel` and this project's safetensors, checking names
and shapes."""

import hashlib
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from clap_ds.config.model import CONTEXT_LENGTH, ClapConfig, parse_sizes
from clap_ds.config.transformers_config import read_clap
from clap_ds.cpu_kernels.patch_model import patch_model
from clap_ds.model.clap import ClapModel, new_model
from clap_ds.model.contrastive import ContrastiveModel
from clap_ds.model.kernels import torch_kernels
from clap_ds.utils import files
from clap_ds.utils.errors import some
from clap_ds.weights.hub import check_recorded
from clap_ds.weights.key_mapping import State, from_names, to_names, transformers_names

METADATA_KEY = "clap_ds.config"
CONTEXT_LENGTH_KEY = "clap_ds.context_length"
LOGIT_BIAS = "logit_bias"
_NOT_IN_OTHERS = ("audio.tscam_conv.", "audio.head.", LOGIT_BIAS)
_OPTIONAL = ("tscam_conv.", ".head.", LOGIT_BIAS, "logit_scale_t")
_FUSION = (".mel_conv2d.", ".fusion_model.")
_CONSTANTS = (".relative_position_index", ".attn_mask", ".position_ids", ".token_type_ids")
"""Suffixes of constants that other CLAPs save as tensors."""


class MismatchError(ValueError):
    """Raised for tensors that don't fit a model: `count` of them."""

    count: int


@dataclass(frozen=True)
class Checkpoint:
    """Hold a model's sizes and state in `ClapModel`'s names, and its training's tokenizer, caption
    length and loss. `path` is its origin; `reached` describes its step and `best_metric` value.
    `trusts_tokenizer` states whether `tokenizer` is a folder inside it, or chosen by the user. A
    name that only a file states may not be any place."""

    config: ClapConfig
    state: State
    tokenizer: str | None = None
    context_length: int | None = None
    loss_kind: str = "softmax"
    path: str = ""
    reached: str = ""
    trusts_tokenizer: bool = False

    @property
    def shown(self) -> str:
        return f"{self.path}, {self.reached}" if self.reached else self.path

    @property
    def tokenizer_name(self) -> str | None:
        """Return its own tokenizer, or the one on the Hub for its text tower. Raises ValueError for
          a name that only users may
        choose."""
        name = self.tokenizer or self.config.text.hub_name or None
        if name is None or self.trusts_tokenizer:
            return name
        return check_recorded(name, self.path, "--tokenizer")

    @property
    def longest_caption(self) -> int:
        """Return the tokens to which every use of the model truncates captions: training's, or
        LAION's if unknown."""
        tokens = self.context_length
        if not isinstance(tokens, int) or tokens < 2:  # files state it, maybe wrongly
            tokens = CONTEXT_LENGTH
        return min(tokens, self.config.text.max_tokens)

    @property
    def fingerprint(self) -> str:
        """Return a hash of the sizes and fp32 tensors that determine embeddings."""
        digest = hashlib.sha256(
            self.config.model_dump_json(exclude={"name": True, "text": {"hub_name"}}).encode()
        )
        for name in sorted(self.state):
            if not name.startswith((*_NOT_IN_OTHERS, "logit_scale")):
                digest.update(name.encode())
                digest.update(self.state[name].float().contiguous().numpy().data)
        return digest.hexdigest()[:32]

    def build_for(self, device: torch.device, dtype: torch.dtype) -> ContrastiveModel:
        """Build the model for inference, with the fastest kernels that need no compilation."""
        model = self.build(**torch_kernels(device)._asdict()).to(device, dtype).eval()
        if device.type == "cpu":
            patch_model(model)
        return model

    @property
    def is_audio_tower(self) -> bool:
        return all(name.startswith("audio.") for name in self.state)

    def build(self, **options: Any) -> ContrastiveModel:
        if self.is_audio_tower:
            raise ValueError(
                f"{self.path} contains only an audio tower: load it with clap.train.pretrained"
            )
        model = new_model(self.config, **{"learns_bias": LOGIT_BIAS in self.state, **options})
        self.load_into(model)
        return model

    def load_into(self, model: ContrastiveModel) -> None:
        """Copy the weights into a model. Raises ValueError for other names or shapes, except
        missing optional tensors."""
        state = {
            name: t
            for name, t in self.state.items()
            if name != LOGIT_BIAS or model.logit_bias is not None
        }
        expected = htsat_alone(model.state_dict()) if self.is_audio_tower else model.state_dict()
        _check(
            state, expected, f"a checkpoint of {self.config.name} doesn't fit {model.config.name}"
        )
        model.load_state_dict(state, strict=False)


def load_transformers(folder: str | Path) -> Checkpoint:
    """Read a folder saved by `transformers.ClapModel`. Raises ValueError for other contents."""
    folder = Path(folder)
    tensors = {}
    sizes = folder / "config.json"
    tokenizer = folder / "tokenizer_config.json"
    config = parse_sizes(read_clap(sizes, files.read_object(sizes)), folder.name, str(sizes))
    for file in sorted(folder.glob("model*.safetensors")):
        tensors.update(read_safetensors(file)[0])
    if not tensors:
        raise ValueError(
            f"{folder}: no model.safetensors, whole or in parts (pickled weights are not read)"
        )
    found = renamed_checkpoint(config, tensors, transformers_names, str(folder))
    if not tokenizer.exists():
        return found
    cut = files.read_object(tokenizer).get(
        "model_max_length"
    )  # used if below the model's positions
    tokens = cut if isinstance(cut, int) and 2 <= cut < config.text.max_tokens else None
    return replace(found, tokenizer=str(folder), trusts_tokenizer=True, context_length=tokens)


def save_transformers(model: ContrastiveModel, folder: str | Path) -> None:
    """Write an fp32 folder for transformers' `ClapModel.from_pretrained` and
    `ClapFeatureExtractor.from_pretrained`. Omits the AudioSet classifier and the logit bias. Raises
    ValueError if ClapModel can't express the model."""
    from clap_ds.weights.key_mapping import config_to_transformers, feature_extractor, transformers

    theirs: Any = transformers.ClapModel(config_to_transformers(model.config))
    theirs.load_state_dict(
        to_transformers(model.state_dict()), strict=False
    )  # it creates constants itself
    theirs.save_pretrained(folder)
    feature_extractor(model.config.audio).save_pretrained(folder)
    for file in Path(folder).glob("*.safetensors"):
        shutil.copymode(
            Path(folder) / "config.json", file
        )  # safetensors creates files that only their owner can read


def to_transformers(state: Mapping[str, Tensor]) -> State:
    """Convert a `ClapModel` state to fp32 with `transformers.ClapModel`'s names and the logit scale
    in both directions."""
    named = to_names(
        {k: v for k, v in state.items() if not k.startswith(_NOT_IN_OTHERS)}, transformers_names
    )
    named["logit_scale_t"] = named["logit_scale_a"].clone()
    return {
        name: tensor.float() if tensor.is_floating_point() else tensor
        for name, tensor in named.items()
    }


def to_safetensors(
    state: Mapping[str, Tensor], config: ClapConfig, context_length: int | None = None
) -> tuple[State, dict[str, str]]:
    """Return a safetensors file's tensors, of unchanged dtypes, and metadata; `context_length` is
    training's."""
    tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in state.items()}
    return tensors, {
        METADATA_KEY: config.model_dump_json(),
        CONTEXT_LENGTH_KEY: str(context_length),
        "format": "pt",
    }


def from_safetensors(path: Path, state: State, metadata: Mapping[str, str]) -> Checkpoint:
    """Build a checkpoint from the content of a file of `to_safetensors`. Raises ValueError if it
    contradicts itself."""
    config = ClapConfig.model_validate_json(metadata[METADATA_KEY])
    tokens = metadata.get(CONTEXT_LENGTH_KEY, "")
    if not config.open_clip:  # whose models are checked when they are loaded
        expected = _expected(config.model_dump_json(), learns_bias=LOGIT_BIAS in state)
        _check(state, expected, f"{path} doesn't fit its own sizes ({config.name})")
    return _checkpoint(config, state, context_length=int(tokens) if tokens.isdecimal() else None)


def renamed_checkpoint(
    config: ClapConfig, tensors: Mapping[str, Tensor], names: Callable[[str], list[str]], label: str
) -> Checkpoint:
    """Build a checkpoint from tensors, maybe of HTSAT alone, with other names. Raises MismatchError
    if they don't fit."""
    expected = _expected(config.model_dump_json(), learns_bias=LOGIT_BIAS in tensors)
    if not any("text" in name for name in tensors):
        expected = htsat_alone(expected)
    _check(tensors, to_names(expected, names), f"{label} doesn't fit {config.name}")
    return _checkpoint(config, from_names(expected, names, tensors))


def _checkpoint(config: ClapConfig, state: State, **told: Any) -> Checkpoint:
    return Checkpoint(
        config, state, loss_kind="sigmoid" if LOGIT_BIAS in state else "softmax", **told
    )


def htsat_alone(state: Mapping[str, Tensor]) -> State:
    """Return the audio tower's part of a state that HTSAT's own checkpoints have: without
    projection and feature fusion."""
    inside = {name: tensor for name, tensor in state.items() if name.startswith("audio.")}
    return {
        name: tensor for name, tensor in inside.items() if not any(part in name for part in _FUSION)
    }


@cache
def _expected(sizes: str, *, learns_bias: bool = False) -> State:
    """Return the state of a model of these sizes (JSON) on the meta device."""
    with torch.device("meta"):
        return ClapModel(
            ClapConfig.model_validate_json(sizes), learns_bias=learns_bias
        ).state_dict()


def _check(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], complaint: str) -> None:
    """Raise MismatchError for missing, unexpected or differently shaped tensors."""
    problems = {
        "missing": [
            name
            for name in expected
            if name not in found and not any(part in name for part in _OPTIONAL)
        ],
        "unexpected": [
            name for name in found if name not in expected and not name.endswith(_CONSTANTS)
        ],
        "different shape": [
            f"{name} {tuple(tensor.shape)} instead of {tuple(expected[name].shape)}"
            for name, tensor in found.items()
            if name in expected and tensor.shape != expected[name].shape
        ],
    }
    if told := [f"{kind}: {some(names)}" for kind, names in problems.items() if names]:
        error = MismatchError(". ".join([complaint, *told]))
        error.count = sum(map(len, problems.values()))
        raise error


def write_tensors(path: Path, tensors: State, metadata: dict[str, str]) -> None:
    """Write a new safetensors file. Raises OSError."""
    path.touch()
    mode = path.stat().st_mode
    try:
        safetensors.torch.save_file(tensors, path, metadata)
    except safetensors.SafetensorError as error:
        raise OSError(f"{path.name}: {error}") from error
    path.chmod(mode)  # safetensors creates files that only their owner can read


def read_safetensors(path: Path) -> tuple[State, dict[str, str]]:
    try:
        with files.pinned(path) as opened, safetensors.safe_open(opened, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (OSError, safetensors.SafetensorError) as error:
        raise ValueError(f"{path}: can't be read as safetensors: {error}") from error
