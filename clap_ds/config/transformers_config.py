"""Convert the files of a `transformers.ClapModel` and its `ClapFeatureExtractor` to the format of
`presets/*.json`, without transformers.

Unsupported models and front ends are rejected with the reason.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from clap_ds.config.model_names import PRESET_DIR
from clap_ds.utils.files import read_object

# fixed properties of HTSAT and RoBERTa here, and transformers' defaults
FIXED_AUDIO = {"hidden_act": "gelu", "qkv_bias": True, "layer_norm_eps": 1e-5}
FIXED_TEXT = {"hidden_act": "gelu", "type_vocab_size": 1, "pad_token_id": 1}
FIXED_FRONT_END = {
    "feature_extractor_type": "ClapFeatureExtractor", "padding": "repeatpad", "padding_side": "right",
    "padding_value": 0, "return_attention_mask": False, "top_db": None,
}  # fmt: skip
# field of a preset → transformers' field, one dict per object
AUDIO = {
    "attention_window": "window_size", "mel_bins": "num_mel_bins", "image_size": "spec_size", "depths": "depths",
    "embed_dim": "patch_embeds_hidden_size", "num_heads": "num_attention_heads", "num_classes": "num_classes",
    "fusion": "enable_fusion", "patch_size": "patch_size",
}  # fmt: skip
TEXT = {
    "vocab_size": "vocab_size", "max_positions": "max_position_embeddings", "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers", "num_heads": "num_attention_heads", "intermediate_size": "intermediate_size",
}  # fmt: skip
FRONT_END = {
    "sample_rate": "sampling_rate", "stft_window": "fft_window_size", "hop_size": "hop_length", "fmin": "frequency_min",
    "fmax": "frequency_max",
}  # fmt: skip


def convert_clap_config(fields: dict[str, Any]) -> dict[str, Any]:
    """Convert `config.json` to a preset's sections, unchecked, with LAION-CLAP's front end.

    Missing fields take transformers' defaults, which `clap_htsat_tiny_roberta_base` has. Raises
    ValueError that names an unsupported field.
    """
    model_type = fields.get("model_type")
    if model_type != "clap":
        raise ValueError(f"config.json has model_type {model_type!r}, expected 'clap'")
    audio = fields.get("audio_config") or {}
    text = fields.get("text_config") or {}
    _require_supported(audio, text)
    joint_dim = fields.get("projection_dim", 512)
    activation = fields.get("projection_hidden_act", "relu")
    projection = {"hidden_dim": joint_dim, "activation": activation, "bias": True}

    defaults = read_object(PRESET_DIR / "clap_htsat_tiny_roberta_base.json")
    audio_sizes = _rename({**defaults["audio"], "fusion": False}, audio, AUDIO)
    audio_sizes |= {"mlp_ratio": round(audio.get("mlp_ratio", 4.0)), "projection": projection}
    text_sizes = _rename(defaults["text"], text, TEXT)
    # The file doesn't name the tokenizer. Other sizes mean another one than RoBERTa's.
    if text_sizes != defaults["text"]:
        text_sizes["hub_name"] = ""
    text_sizes["layer_norm_eps"] = text.get("layer_norm_eps", 1e-12)
    text_sizes |= {"pooling": "cls_pooler", "projection": projection}
    return {"audio": audio_sizes, "text": text_sizes, "joint_dim": joint_dim}


def _require_supported(audio: dict[str, Any], text: dict[str, Any]) -> None:
    patch_size = audio.get("patch_size", 4)
    patch_stride = [patch_size, patch_size]
    # transformers accepts a number, too.
    if audio.get("patch_stride") == patch_size:
        patch_stride = patch_size
    expected = {
        **FIXED_AUDIO,
        "fusion_type": "aff_2d" if audio.get("fusion_type") else None,
        "patch_stride": patch_stride,
        # a whole number, also as 4.0
        "mlp_ratio": round(audio.get("mlp_ratio", 4.0)),
    }
    _require(audio, expected, "audio_config.")
    _require(text, FIXED_TEXT, "text_config.")


def _rename(
    defaults: dict[str, Any], fields: dict[str, Any], names: dict[str, str]
) -> dict[str, Any]:
    """Return a preset's section with the values that `fields` has, whose names differ."""
    renamed = {name: fields[other] for name, other in names.items() if other in fields}
    return {**defaults, **renamed}


def convert_front_end(saved: dict[str, Any], audio: dict[str, Any]) -> dict[str, Any]:
    """Convert a saved `ClapFeatureExtractor` to fields of a preset's `audio` section. Raises
    ValueError for a value that the front end here can't have."""
    # the defaults of its class where they differ from LAION-CLAP's values
    extractor = {"frequency_min": 0, "max_length_s": 10, **saved}
    sizes = _rename({name: audio[name] for name in FRONT_END}, extractor, FRONT_END)
    # saved as 14000 or 14000.0
    sizes["fmax"] = int(sizes["fmax"])
    sizes["num_samples"] = extractor["max_length_s"] * sizes["sample_rate"]
    expected = {
        **FIXED_FRONT_END,
        "frequency_max": sizes["fmax"],
        "feature_size": audio["mel_bins"],
        "nb_max_samples": sizes["num_samples"],
        "nb_frequency_bins": sizes["stft_window"] // 2 + 1,
    }
    # "fusion" has other mel filters than the other modes, which only differ in how they treat clips
    # that are too long.
    if audio["fusion"]:
        expected["truncation"] = "fusion"
    elif extractor.get("truncation") == "fusion":
        expected["truncation"] = "rand_trunc"
    _require(extractor, expected)
    return sizes


def _require(fields: dict[str, Any], expected: dict[str, Any], section: str = "") -> None:
    """Raise ValueError for a field that has another value than expected."""
    for name, value in expected.items():
        if fields.get(name, value) != value:
            supported = f"only {value!r} is supported with this model"
            raise ValueError(f"{section}{name} is {fields[name]!r}; {supported}")


def read_clap_config(path: Path, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes of a `config.json`, read as `fields`, and of the front end saved beside it.

    Prints which front end is assumed if there is none. Raises ValueError, with the file, if they
    are unreadable or unsupported.
    """
    front_end_path = path.with_name("processor_config.json")
    saved = None
    # transformers 5 nests the front end in this file, which it prefers.
    if front_end_path.exists():
        saved = read_object(front_end_path).get("feature_extractor")
    if saved is None:
        # Earlier versions wrote this one.
        front_end_path = path.with_name("preprocessor_config.json")
        saved = read_object(front_end_path) if front_end_path.exists() else None
    read_path = path
    try:
        sizes = convert_clap_config(fields)
        if saved is not None:
            read_path = front_end_path
            sizes["audio"] |= convert_front_end(saved, sizes["audio"])
    # fields of wrong types
    except (AttributeError, LookupError, TypeError, ArithmeticError) as error:
        problem = f"can't be read: {type(error).__name__}: {error}"
        raise ValueError(f"{read_path}: {problem}") from error
    except ValueError as error:
        raise ValueError(f"{read_path}: {error}") from None
    if saved is None and os.environ.get("RANK") in (None, "0"):
        missing = f"no processor_config.json or preprocessor_config.json by {path}"
        front_end = "LAION-CLAP's front end: 48 kHz, 10 s, window 1024, hop 480, 50 to 14,000 Hz"
        print(f"note: {missing}: assuming {front_end}", file=sys.stderr)
    return sizes
