"""What mustn't stand in records, logs and reports, which are sent to colleagues: values of options and parts of URLs that open
something. Credentials belong into the environment, which isn't recorded; people type them nevertheless. Standard library
only."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

HIDDEN = "[hidden]"
_SECRET = r"[\w.-]*(?:token(?!s|i)|secret|passw(?:or)?d|credential|signature|api[_-]?key|access[_-]?key|\bsig\b)[\w.-]*"
_OPTION = re.compile(rf"(--?{_SECRET})([= ]['\"]?)(?!-)[^\s'\"]+", re.IGNORECASE)
_IN_URL = re.compile(rf"(\b[a-z][a-z0-9+.-]*://[^\s?'\"]*\?)(?=[^\s'\"]*{_SECRET}=)[^\s'\"]+", re.IGNORECASE)
_USER = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^\s/@'\"]*:[^\s/@'\"]*@", re.IGNORECASE)
_KNOWN = re.compile(r"\b(?:hf_[A-Za-z0-9]{20,}|AKIA[A-Z0-9]{16}|gh[pousr]_[A-Za-z0-9]{30,})\b")
_VARIABLE = re.compile(
    r"\b([A-Z][A-Z0-9_]*(?:TOKEN(?!S|I)|SECRET|PASSWORD|API_KEY|ACCESS_KEY)[A-Z0-9_]*=|Bearer )[^\s'\",]+"
)
_NAME = re.compile(rf"--?{_SECRET}", re.IGNORECASE)


def redacted(text: str) -> str:
    """Text with `[hidden]` for what looks like a secret: `--hf_token=…`, `HF_TOKEN=…`, a presigned URL's parameters,
    `://user:password@`."""
    text = _USER.sub(rf"\1{HIDDEN}@", _IN_URL.sub(rf"\1{HIDDEN}", text))
    return _VARIABLE.sub(rf"\1{HIDDEN}", _KNOWN.sub(HIDDEN, _OPTION.sub(rf"\1\2{HIDDEN}", text)))


def redacted_words(words: Iterable[str]) -> list[str]:
    """A command's words, of which one may be the value of the option before it."""
    found: list[str] = []
    for word in words:
        is_value = bool(found) and _NAME.fullmatch(found[-1]) is not None and not word.startswith("-")
        found.append(HIDDEN if is_value else redacted(word))
    return found


def redacted_all(content: Any) -> Any:
    """The same in all texts of what JSON holds."""
    if isinstance(content, str):
        return redacted(content)
    if isinstance(content, dict):
        return {redacted_all(name): redacted_all(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return (
            redacted_words(content) if all(isinstance(each, str) for each in content) else [*map(redacted_all, content)]
        )
    return content
