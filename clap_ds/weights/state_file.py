"""Store nested dictionaries, lists, numbers, text and tensors in a safetensors file, which can't
contain code.

The structure is JSON in the file's metadata.
"""

import json
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from clap_ds.config.files import parse_json, pinned
from clap_ds.weights.checkpoint_files import FileRecord, record_of
from clap_ds.weights.key_mapping import State

KEY = "clap_ds.state"


def write_tensors(path: Path, tensors: State, metadata: dict[str, str]) -> FileRecord:
    """Write a new safetensors file and flush it to disk. Raises OSError."""
    path.touch()
    mode = path.stat().st_mode
    try:
        safetensors.torch.save_file(tensors, path, metadata)
    except safetensors.SafetensorError as error:
        raise OSError(f"{path.name}: {error}") from error
    path.chmod(mode)  # safetensors creates files that only their owner can read
    return record_of(path)


def to_state_file(state: Any) -> tuple[State, dict[str, str]]:
    """Return the file's tensors and metadata."""
    tensors: State = {}
    return tensors, {KEY: json.dumps(_described(state, tensors, set()))}


def _described(value: Any, tensors: dict[str, Tensor], storages: set[int]) -> Any:
    """Convert a value to JSON types, moving its tensors to the CPU and into `tensors`."""
    if isinstance(value, Tensor):
        tensor = value.detach().to("cpu").contiguous()
        storage = tensor.untyped_storage().data_ptr()
        if storage in storages:  # safetensors rejects tensors that share memory
            tensor = tensor.clone()
        storages.add(storage)
        tensors[name := str(len(tensors))] = tensor
        return {"tensor": name}
    if isinstance(value, dict):
        items = [[_described(part, tensors, storages) for part in item] for item in value.items()]
        return {"dict": items}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [_described(part, tensors, storages) for part in value]}
    return value


def read_state_file(path: Path) -> Any:
    """Read the state given to `to_state_file`. Raises ValueError for an invalid file."""
    try:
        with pinned(path) as opened, safetensors.safe_open(opened, framework="pt") as file:
            return _restored(
                parse_json((file.metadata() or {})[KEY], allow_nan=True), file.get_tensor
            )
    except (
        OSError,
        LookupError,
        TypeError,
        ValueError,
        RecursionError,
        safetensors.SafetensorError,
    ) as error:
        raise ValueError(f"{path}: can't be read as a state: {error}") from error


def _restored(described: Any, tensor_of: Any) -> Any:
    if not isinstance(described, dict):
        return described
    ((kind, content),) = described.items()
    if kind == "tensor":
        return tensor_of(content)
    if kind == "dict":
        return {_restored(key, tensor_of): _restored(value, tensor_of) for key, value in content}
    return {"list": list, "tuple": tuple}[kind](_restored(part, tensor_of) for part in content)
