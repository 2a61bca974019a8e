"""Names of the models that have a preset. Standard library only."""

from __future__ import annotations

from pathlib import Path

PRESET_DIR = Path(__file__).with_name("presets")


def preset_names() -> list[str]:
    """Of all presets, sorted."""
    return sorted(path.stem for path in PRESET_DIR.glob("*.json"))


def preset_of(name: str) -> str:
    """The preset of a model's name as published (`HTSAT-tiny-Roberta-base`) or as open_clip's (`CLAP-…`); else the name."""
    plain = name.casefold().replace("-", "_").removeprefix("clap_")
    return plain if plain in preset_names() else name
