"""Names of the models that have a preset. Standard library only."""

from __future__ import annotations

from pathlib import Path

PRESET_DIR = Path(__file__).with_name("presets")


def preset_names() -> list[str]:
    """Of all presets, sorted."""
    return sorted(path.stem for path in PRESET_DIR.glob("*.json"))


def preset_of(name: str) -> str:
    """The preset of a model's name as published (`HTSAT-tiny-Roberta-base`) or as open_clip's (`CLAP-HTSAT-base-Roberta-base`);
    else the name. Some of open_clip's with `CLAP-` are models of their own, the others those without it."""
    plain, known = name.casefold().replace("-", "_"), preset_names()
    return next((each for each in (plain, plain.removeprefix("clap_")) if each in known), name)
