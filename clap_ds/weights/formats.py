"""Weights as files of this project and of `transformers.ClapModel`, with names and shapes checked.

A `Checkpoint` has the names of `ClapModel`, whichever format it was read from. `MismatchError`
lists the tensors that don't fit.
"""

import hashlib
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from clap_ds.config.model import CONTEXT_LENGTH, ClapConfig, parse_sizes
from clap_ds.config.transformers_config import read_clap_config
from clap_ds.cpu_kernels.patch_model import patch_model
from clap_ds.model.clap import ClapModel, new_model
from clap_ds.model.contrastive import ContrastiveModel
from clap_ds.model.kernels import torch_kernels
from clap_ds.utils import files
from clap_ds.utils.errors import some
from clap_ds.weights.hub import check_recorded
from clap_ds.weights.key_mapping import (
    NameMapping,
    State,
    config_to_transformers,
    feature_extractor,
    from_names,
    to_names,
    transformers,
    transformers_names,
)

METADATA_KEY = "clap_ds.config"
CONTEXT_LENGTH_KEY = "clap_ds.context_length"
LOGIT_BIAS = "logit_bias"
# Prefixes of HTSAT's AudioSet classifier, which isn't used.
_CLASSIFIER = ("audio.tscam_conv.", "audio.head.")
# Parts of names of tensors that may be missing, in all formats.
_OPTIONAL = ("tscam_conv.", ".head.", LOGIT_BIAS, "logit_scale_t")
_FUSION = (".mel_conv2d.", ".fusion_model.")
# Suffixes of constants that other CLAPs save as tensors.
_CONSTANTS = (".relative_position_index", ".attn_mask", ".position_ids", ".token_type_ids")


class MismatchError(ValueError):
    """Tensors don't fit a model: `count` of them."""

    def __init__(self, message: str, count: int) -> None:
        super().__init__(message)
        self.count = count


@dataclass(frozen=True)
class Checkpoint:
    """A model's sizes and state in `ClapModel`'s names, and what is known of its training.

    Attributes:
        tokenizer: name or folder, if known.
        context_length: training's caption length in tokens, if known.
        path: its origin.
        reached: its step and the value of `best_metric`, for messages.
        trusts_tokenizer: whether `tokenizer` is a folder inside the checkpoint, or chosen by the
            user. A name that only a file states could be any place.
    """

    config: ClapConfig
    state: State
    tokenizer: str | None = None
    context_length: int | None = None
    loss_kind: str = "softmax"
    path: str = ""
    reached: str = ""
    trusts_tokenizer: bool = False

    @property
    def description(self) -> str:
        return f"{self.path}, {self.reached}" if self.reached else self.path

    @property
    def tokenizer_name(self) -> str | None:
        """Return its own tokenizer, or the one on the Hub for its text tower.

        Raises ValueError for a name that only users may choose.
        """
        name = self.tokenizer or self.config.text.hub_name or None
        if name is None or self.trusts_tokenizer:
            return name
        return check_recorded(name, self.path, "--tokenizer")

    @property
    def longest_caption(self) -> int:
        """Return the tokens to which every use of the model truncates captions: training's, or
        LAION's if unknown."""
        tokens = self.context_length
        # Files state it, maybe wrongly.
        if not isinstance(tokens, int) or tokens < 2:
            tokens = CONTEXT_LENGTH
        return min(tokens, self.config.text.max_tokens)

    @property
    def fingerprint(self) -> str:
        """Return a hash of the sizes and fp32 tensors that determine embeddings."""
        text = self.config.text
        # Padding has no effect, and most models no prefix.
        excluded: Any = {"name": True, "text": {"hub_name", "pad_token_id", "caption_prefix"}}
        sizes = self.config.model_dump_json(exclude=excluded)
        digest = hashlib.sha256((sizes + text.caption_prefix).encode())
        for name in sorted(self.state):
            if name.startswith((*_CLASSIFIER, LOGIT_BIAS, "logit_scale")):
                continue
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
        """Copy the weights into a model.

        Raises ValueError for other names or shapes, except missing optional tensors.
        """
        state = {**self.state}
        if model.logit_bias is None:
            state.pop(LOGIT_BIAS, None)
        expected = model.state_dict()
        if self.is_audio_tower:
            expected = htsat_alone(expected)
        problem = f"a checkpoint of {self.config.name} doesn't fit {model.config.name}"
        _check_tensors(state, expected, problem)
        model.load_state_dict(state, strict=False)


def load_transformers(folder: str | Path) -> Checkpoint:
    """Read a folder saved by `transformers.ClapModel`. Raises ValueError for other contents."""
    folder = Path(folder)
    sizes_file = folder / "config.json"
    sizes = read_clap_config(sizes_file, files.read_object(sizes_file))
    config = parse_sizes(sizes, folder.name, str(sizes_file))
    tensors: State = {}
    # Large models are saved in parts.
    for file in sorted(folder.glob("model*.safetensors")):
        tensors.update(read_safetensors(file)[0])
    if not tensors:
        raise ValueError(
            f"{folder}: no model.safetensors, whole or in parts (pickled weights are not read)"
        )
    checkpoint = renamed_checkpoint(config, tensors, transformers_names, str(folder))
    tokenizer_file = folder / "tokenizer_config.json"
    if not tokenizer_file.exists():
        return checkpoint
    # The caption length is training's only if it is below the model's positions.
    context_length = files.read_object(tokenizer_file).get("model_max_length")
    if not isinstance(context_length, int) or not 2 <= context_length < config.text.max_tokens:
        context_length = None
    return replace(
        checkpoint, tokenizer=str(folder), trusts_tokenizer=True, context_length=context_length
    )


def save_transformers(model: ContrastiveModel, folder: str | Path) -> None:
    """Write an fp32 folder for transformers' `ClapModel.from_pretrained` and
    `ClapFeatureExtractor.from_pretrained`.

    Omits the AudioSet classifier and the logit bias. Raises ValueError if ClapModel can't express
    the model.
    """
    clap_model: Any = transformers.ClapModel(config_to_transformers(model.config))
    # Not strict, as it creates constants itself.
    clap_model.load_state_dict(to_transformers(model.state_dict()), strict=False)
    clap_model.save_pretrained(folder)
    feature_extractor(model.config.audio).save_pretrained(folder)
    for file in Path(folder).glob("*.safetensors"):
        # safetensors creates files that only their owner can read.
        shutil.copymode(Path(folder) / "config.json", file)


def to_transformers(state: Mapping[str, Tensor]) -> State:
    """Convert a `ClapModel` state to fp32 with `transformers.ClapModel`'s names and the logit scale
    in both directions."""
    shared = {
        name: tensor
        for name, tensor in state.items()
        if not name.startswith((*_CLASSIFIER, LOGIT_BIAS))
    }
    renamed = to_names(shared, transformers_names)
    renamed["logit_scale_t"] = renamed["logit_scale_a"].clone()
    return to_fp32(renamed)


def to_fp32(state: Mapping[str, Tensor]) -> State:
    """Convert the floating-point tensors of a state."""
    return {
        name: tensor.float() if tensor.is_floating_point() else tensor
        for name, tensor in state.items()
    }


def to_safetensors(
    state: Mapping[str, Tensor], config: ClapConfig, context_length: int | None = None
) -> tuple[State, dict[str, str]]:
    """Return a safetensors file's tensors, of unchanged dtypes, and metadata; `context_length` is
    training's."""
    tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in state.items()}
    metadata = {
        METADATA_KEY: config.model_dump_json(),
        CONTEXT_LENGTH_KEY: str(context_length),
        "format": "pt",
    }
    return tensors, metadata


def from_safetensors(path: Path, state: State, metadata: Mapping[str, str]) -> Checkpoint:
    """Build a checkpoint from the content of a file of `to_safetensors`.

    Raises ValueError if it contradicts itself.
    """
    config = ClapConfig.model_validate_json(metadata[METADATA_KEY])
    tokens = metadata.get(CONTEXT_LENGTH_KEY, "")
    # open_clip's models are checked when they are loaded.
    if not config.open_clip:
        expected = _expected_state(config.model_dump_json(), learns_bias=LOGIT_BIAS in state)
        _check_tensors(state, expected, f"{path} doesn't fit its own sizes ({config.name})")
    context_length = int(tokens) if tokens.isdecimal() else None
    return _with_loss(Checkpoint(config, state, context_length=context_length))


def renamed_checkpoint(
    config: ClapConfig, tensors: Mapping[str, Tensor], names: NameMapping, label: str
) -> Checkpoint:
    """Build a checkpoint from tensors, maybe of HTSAT alone, with other names.

    Raises MismatchError if they don't fit.
    """
    expected = _expected_state(config.model_dump_json(), learns_bias=LOGIT_BIAS in tensors)
    if not any("text" in name for name in tensors):
        expected = htsat_alone(expected)
    _check_tensors(tensors, to_names(expected, names), f"{label} doesn't fit {config.name}")
    return _with_loss(Checkpoint(config, from_names(expected, names, tensors)))


def _with_loss(checkpoint: Checkpoint) -> Checkpoint:
    """Set the loss: only SigLIP's has a bias."""
    kind = "sigmoid" if LOGIT_BIAS in checkpoint.state else "softmax"
    return replace(checkpoint, loss_kind=kind)


def htsat_alone(state: Mapping[str, Tensor]) -> State:
    """Return the audio tower's part of a state that HTSAT's own checkpoints have: without
    projection and feature fusion."""
    return {
        name: tensor
        for name, tensor in state.items()
        if name.startswith("audio.") and not contains_any(name, _FUSION)
    }


def contains_any(name: str, parts: Iterable[str]) -> bool:
    """Return whether a tensor's name contains one of the parts."""
    return any(part in name for part in parts)


@cache
def _expected_state(sizes: str, *, learns_bias: bool) -> State:
    """Return the state of a model of these sizes (JSON) on the meta device."""
    config = ClapConfig.model_validate_json(sizes)
    with torch.device("meta"):
        return ClapModel(config, learns_bias=learns_bias).state_dict()


def _check_tensors(
    tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], problem: str
) -> None:
    """Raise MismatchError, with `problem`, for missing, unexpected or differently shaped
    tensors."""
    missing = []
    unexpected = []
    reshaped = []
    for name in expected:
        if name not in tensors and not contains_any(name, _OPTIONAL):
            missing.append(name)
    for name, tensor in tensors.items():
        if name in expected:
            shape = tuple(expected[name].shape)
            if tensor.shape != shape:
                reshaped.append(f"{name} {tuple(tensor.shape)} instead of {shape}")
        elif not name.endswith(_CONSTANTS):
            unexpected.append(name)
    parts = [problem]
    for kind, names in (
        ("missing", missing), ("unexpected", unexpected), ("different shape", reshaped),
    ):  # fmt: skip
        if names:
            parts.append(f"{kind}: {some(names)}")
    count = len(missing) + len(unexpected) + len(reshaped)
    if count:
        raise MismatchError(". ".join(parts), count)


def write_tensors(path: Path, tensors: State, metadata: dict[str, str]) -> None:
    """Write a new safetensors file. Raises OSError."""
    path.touch()
    mode = path.stat().st_mode
    try:
        safetensors.torch.save_file(tensors, path, metadata)
    except safetensors.SafetensorError as error:
        raise OSError(f"{path.name}: {error}") from error
    # safetensors creates files that only their owner can read.
    path.chmod(mode)


def read_safetensors(path: Path) -> tuple[State, dict[str, str]]:
    """Return a file's tensors and metadata. Raises ValueError."""
    try:
        with files.hold_file(path) as opened, safetensors.safe_open(opened, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return tensors, file.metadata() or {}
    except (OSError, safetensors.SafetensorError) as error:
        raise ValueError(f"{path}: can't be read as safetensors: {error}") from error
