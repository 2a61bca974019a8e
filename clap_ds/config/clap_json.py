"""Convert the `config.json` of a `transformers.ClapModel` to the format of `presets/*.json`, without transformers.

Unsupported models are rejected with the reason.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clap_ds.config.files import read_object
from clap_ds.config.model_names import PRESET_DIR

# Fixed properties of HTSAT and RoBERTa here, and transformers' defaults.
FIXED_AUDIO = {"hidden_act": "gelu", "qkv_bias": True, "layer_norm_eps": 1e-5}
FIXED_TEXT = {"hidden_act": "gelu", "type_vocab_size": 1, "pad_token_id": 1}
# Our field → transformers' field, one dict per object.
AUDIO = {
    "attention_window": "window_size", "mel_bins": "num_mel_bins", "image_size": "spec_size", "depths": "depths",
    "embed_dim": "patch_embeds_hidden_size", "num_heads": "num_attention_heads", "num_classes": "num_classes",
    "fusion": "enable_fusion",
}  # fmt: skip
TEXT = {
    "vocab_size": "vocab_size", "max_positions": "max_position_embeddings", "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers", "num_heads": "num_attention_heads", "intermediate_size": "intermediate_size",
}  # fmt: skip
FRONT_END = {
    "sample_rate": "sampling_rate", "stft_window": "fft_window_size", "hop_size": "hop_length", "fmin": "frequency_min",
    "fmax": "frequency_max",
}  # fmt: skip


def sizes_of_clap(fields: dict[str, Any], front_end: dict[str, Any]) -> dict[str, Any]:
    """Convert `config.json` and `preprocessor_config.json` to a preset's sections, unchecked. Missing fields take transformers'
    defaults, `clap_htsat_tiny_roberta_base`. Raises ValueError naming an unsupported field."""
    if fields.get("model_type") != "clap":
        raise ValueError(f"config.json has model_type {fields.get('model_type')!r}, expected 'clap'")
    audio, text = (fields.get(f"{tower}_config") or {} for tower in ("audio", "text"))
    patch, ratio = audio.get("patch_size", 4), audio.get("mlp_ratio", 4.0)
    activation, joint_dim = fields.get("projection_hidden_act", "relu"), fields.get("projection_dim", 512)
    checks: list[tuple[str, Any, list[Any]]] = [
        *((f"audio_config.{fixed}", audio.get(fixed, value), [value]) for fixed, value in FIXED_AUDIO.items()),
        *((f"text_config.{fixed}", text.get(fixed, value), [value]) for fixed, value in FIXED_TEXT.items()),
        ("audio_config.fusion_type", audio.get("fusion_type"), [None, "aff_2d"]),
        ("audio_config.patch_stride", audio.get("patch_stride", patch), [patch, [patch, patch]]),
        ("audio_config.mlp_ratio", ratio, [round(ratio)]),
        ("projection_hidden_act", activation, ["relu", "gelu"]),
    ]
    for field, found, expected in checks:
        if found not in expected:
            only = " or ".join(map(repr, expected))
            raise ValueError(f"{field} is {found!r}; only {only} is supported")
    tiny = read_object(PRESET_DIR / "clap_htsat_tiny_roberta_base.json")
    projection = {"hidden_dim": joint_dim, "activation": activation, "bias": True}
    tiny["audio"]["fusion"] = False
    own_audio = {ours: audio.get(theirs, tiny["audio"][ours]) for ours, theirs in AUDIO.items()}
    own_audio |= {ours: front_end.get(theirs, tiny["audio"][ours]) for ours, theirs in FRONT_END.items()}
    own_audio |= {"patch_size": patch, "mlp_ratio": round(ratio), "projection": projection}
    own_audio["num_samples"] = front_end.get("max_length_s", 10) * own_audio["sample_rate"]
    own_text = {ours: text.get(theirs, tiny["text"][ours]) for ours, theirs in TEXT.items()}
    is_roberta_base = all(tiny["text"][ours] == value for ours, value in own_text.items())
    own_text |= {"hub_name": tiny["text"]["hub_name"] if is_roberta_base else "", "pooling": "cls_pooler"}
    own_text |= {"layer_norm_eps": text.get("layer_norm_eps", 1e-12), "projection": projection}
    return {"audio": own_audio, "text": own_text, "joint_dim": joint_dim}


def read_clap(path: Path, fields: dict[str, Any]) -> dict[str, Any]:
    """Call `sizes_of_clap` with a `config.json` and the `preprocessor_config.json` next to it, if any.
    Raises ValueError, with the file, if they are unreadable or unsupported."""
    front_end = path.with_name("preprocessor_config.json")
    more = read_object(front_end) if front_end.exists() else {}
    try:
        return sizes_of_clap(fields, more)
    except (AttributeError, LookupError, TypeError, ArithmeticError) as error:  # fields of wrong types
        raise ValueError(f"{path}: can't be read: {type(error).__name__}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
