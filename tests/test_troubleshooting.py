"""Messages that docs/troubleshooting.md shows are in the code."""

import ast
import re
from collections.abc import Iterator

from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
FEWEST_LETTERS = 9


def _patterns() -> Iterator[re.Pattern[str]]:
    """Yield a pattern for each string of the code that has enough fixed text; a replacement field matches anything."""
    for path in (file for folder in ("clap_ds", "launch") for file in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            texts = [str(part.value) for part in parts if isinstance(part, ast.Constant)]
            if len(re.sub(r"\W", "", "".join(texts))) >= FEWEST_LETTERS:
                yield re.compile(".*".join(map(re.escape, texts)))


def test_messages_shown_are_the_codes() -> None:
    shown = "".join(re.findall(r"^```text\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)).splitlines()
    patterns = [*_patterns()]
    assert len(shown) > 15
    assert [line for line in shown if not any(pattern.search(line) for pattern in patterns)] == []
