"""Extract captions from an item's members, and words from class names."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from clap_ds.config.files import parse_json
from clap_ds.data.broken import BrokenItemError

CAPTION_FORMATS = ("txt", "json")
CAPTION_FIELDS = ("caption", "text")


def in_words(name: str) -> str:
    """Convert a class name to caption words: `low_hum` becomes "low hum". Text with spaces is unchanged."""
    return name.strip() if " " in name else name.replace("_", " ").strip()


def names_in_cell(cell: str) -> list[str]:
    """Split names at commas, semicolons or bars."""
    return [name for part in re.split(r"[,;|]", cell) if (name := part.strip())]


def captions_of(members: Mapping[str, Any]) -> list[str]:
    """Return an item's captions from `txt`, or from `caption` or `text` in `json`. Raises BrokenItemError for none."""
    found: Any = None
    try:
        if "txt" in members:
            found = members["txt"].decode("utf-8-sig")
        elif "json" in members and isinstance(content := parse_json(members["json"]), dict):
            found = next((content[name] for name in CAPTION_FIELDS if name in content), None)
    except ValueError as error:
        raise BrokenItemError(f"caption can't be read: {error}") from None
    captions = [found] if isinstance(found, str) else found
    if not isinstance(captions, list) or not all(isinstance(caption, str) for caption in captions):
        raise BrokenItemError("no caption: expected txt, or json with caption or text: a string or list of strings")
    if usable := [caption.strip() for caption in captions if caption.strip()]:
        return usable
    raise BrokenItemError("empty caption")


def monotony(captions: Collection[object]) -> str:
    """Return a warning if captions, one per clip, are all equal or fewer than 2% are distinct; else an empty string."""
    num_different, num_clips = len(set(captions)), len(captions)
    if num_clips < 2 or num_different >= max(2, 0.02 * num_clips):
        return ""
    return f"only {num_different:,} different caption(s) among {num_clips:,} clips; check the caption source"
