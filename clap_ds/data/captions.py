"""An item's text file becomes its captions, and a class's name words of one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from clap_ds.config.files import parse_json
from clap_ds.data.broken import BrokenItemError

CAPTION_FORMATS = ("txt", "json")
CAPTION_FIELDS = ("caption", "text")
MOST_BYTES = 2**20
"""Of the file: tokenizers take seconds for millions of characters, of which a model sees the first few."""


def in_words(name: str) -> str:
    """Write a class's name as captions have it: `low_hum` is "low hum". A text with spaces stays."""
    return name.strip() if " " in name else name.replace("_", " ").strip()


def names_in_cell(cell: str) -> list[str]:
    """Split the names that commas, semicolons or bars separate."""
    return [name for part in re.split(r"[,;|]", cell) if (name := part.strip())]


def captions_of(members: Mapping[str, Any]) -> list[str]:
    """Find the captions among an item's members: `txt`, or `caption` or `text` in `json`; empty ones are left out.
    BrokenItemError where there is none, or what is there can't be read."""
    found: Any = None
    if (size := max([len(members[name]) for name in CAPTION_FORMATS if name in members], default=0)) > MOST_BYTES:
        raise BrokenItemError(f"caption can't be read: a file of {size:,} bytes, expected at most {MOST_BYTES:,}")
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
