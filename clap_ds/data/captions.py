"""An item's text file becomes its captions, and a class's name words of one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from clap_ds.config.files import parse_json
from clap_ds.data.broken import BrokenItemError

CAPTION_FORMATS = ("txt", "json")
CAPTION_FIELDS = ("caption", "text")

_FEWEST = 0.02  # different captions of a clip


def in_words(name: str) -> str:
    """Write a class's name as captions have it: `low_hum` is "low hum". A text with spaces stays."""
    return name.strip() if " " in name else name.replace("_", " ").strip()


def names_in_cell(cell: str) -> list[str]:
    """Split the names that commas, semicolons or bars separate."""
    return [name for part in re.split(r"[,;|]", cell) if (name := part.strip())]


def captions_of(members: Mapping[str, Any]) -> list[str]:
    """Find the captions among an item's members: `txt`, or `caption` or `text` in `json`. BrokenItemError for none."""
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
        raise BrokenItemError("no caption: expected txt, or json with a string or a list of them as caption or text")
    if usable := [caption.strip() for caption in captions if caption.strip()]:
        return usable
    raise BrokenItemError("empty caption")


def monotony(num_different: int, num_clips: int) -> str:
    """Describe captions that hardly differ: all are the same, or they are fewer than 2 % of the clips. Else an empty text."""
    if num_clips < 2 or num_different >= max(2, _FEWEST * num_clips):
        return ""
    check = "a model learns from captions that differ; check that they are of the right column or field"
    return f"only {num_different:,} different caption(s) among {num_clips:,} clips: {check}"
