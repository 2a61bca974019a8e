"""Read the sizes of an installed open_clip's models from its configurations. Imports neither
open_clip nor torch."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from clap_ds.config.model_names import PRESET_DIR
from clap_ds.utils.errors import did_you_mean, first_line, how_to_install
from clap_ds.utils.files import read_object

PREFIX = "open_clip:"
FILE = "open_clip_config.json"
VERSION = "4.2.0.dev0"
REQUIREMENT = "open_clip_torch[audio] @ git+https://github.com/mlfoundations/open_clip"
"""Package indexes have no such version yet."""
AUDIO = {
    "sample_rate": "sample_rate", "num_samples": "clip_samples", "stft_window": "window_size", "hop_size": "hop_size",
    "fmin": "fmin", "fmax": "fmax",
}  # fmt: skip
"""Our fields → open_clip's. Missing ones have HTSAT's values, as there."""


def sizes_of_open_clip(name: str) -> dict[str, Any]:
    """Return a preset's sections for a model, named as for `open_clip.create_model`. They state
    what batches hold; other fields are HTSAT-tiny's and have no effect. Raises ValueError if
    open_clip isn't installed or has no such audio–text model."""
    theirs = _config_of(name)
    sizes = read_object(PRESET_DIR / "htsat_tiny_roberta_base.json")
    audio = theirs["audio_cfg"]
    text = theirs["text_cfg"]
    is_hf = "hf_model_name" in theirs["text_cfg"]
    own = sizes["audio"] | {ours: audio[their] for ours, their in AUDIO.items() if their in audio}
    own["mel_bins"] = (
        audio.get("mel_bins", 64) if audio.get("model_type") == "naflexvit" else own["mel_bins"]
    )
    most_frames = own["num_samples"] // own["hop_size"]
    while own["image_size"] < 2**24 and most_frames >= own["image_size"] ** 2 // own["mel_bins"]:
        own["image_size"] *= 2  # or HTSAT's image could not hold the frames
    sizes["audio"] = own
    length = text.get("context_length", 77)
    is_roberta = "roberta" in text.get("hf_model_name", "")
    sizes["text"] |= {
        "hub_name": PREFIX + name,
        "architecture": "roberta" if is_roberta else "bert",  # pads with token 1 or 0
        "vocab_size": text.get("vocab_size", 28_996 if is_hf else 49_408),
        "max_positions": 514 if is_hf else length,
    }
    return {"name": PREFIX + name, **sizes, "joint_dim": theirs["embed_dim"]}


def _config_of(name: str) -> dict[str, Any]:
    spec = find_spec("open_clip")
    folder = Path(spec.origin).parent if spec and spec.origin else Path()
    if not (folder / "clap_model.py").exists():
        installed = next((item.version for item in distributions(name="open_clip_torch")), "none")
        raise ValueError(
            f"{PREFIX}{name} needs open_clip_torch {VERSION} or later, found {installed}: pip install '{REQUIREMENT}'"
        )
    schema, _, place = name.partition(":")
    if not place:
        known = {
            path.stem: path
            for path in (folder / "model_configs").glob("*.json")
            if "audio_cfg" in path.read_text()
        }
        if name not in known:
            raise ValueError(
                f"open_clip has no audio–text model {name!r}{did_you_mean(name, known, most_listed=0)}"
            )
        return read_object(known[name])
    if schema == "hf-hub":
        from huggingface_hub import snapshot_download

        place = snapshot_download(place, allow_patterns=FILE)
    found = read_object(Path(place) / FILE).get("model_cfg", {})
    if "audio_cfg" not in found:
        raise ValueError(f"{PREFIX}{name} is no audio–text model")
    return found


@contextmanager
def open_clip_for(name: str) -> Iterator[Any]:
    """Yield open_clip to load `name`, whose errors become ValueErrors. Code that models and
    tokenizers bring is never run. Otherwise `transformers` would ask on standard input, and run it
    after "y". Import torchaudio_compat before."""
    from transformers import dynamic_module_utils

    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
    dynamic_module_utils.get_class_in_module = _refuse_code
    dynamic_module_utils._raise_timeout_error = _refuse_code
    try:
        yield importlib.import_module("open_clip")
    except Exception as error:  # open_clip and transformers raise various errors
        raise ValueError(
            f"open_clip can't load {name!r}: {first_line(error)}{how_to_install(error)}"
        ) from error


def _refuse_code(*place: object, **options: object) -> NoReturn:
    raise ValueError("it brings code, which is never run")
