"""Messages that docs/troubleshooting.md shows are in the code."""

import ast
import re

from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
WORD = r"\b(?:(?!micro-batch|SIG|NCCL)[A-Za-z'-]{2,}|a)"
WORDS = re.compile(rf"{WORD}(?: {WORD}(?![\w.=/])){{3,}}")
"""Four words or more in a row: numbers, hosts and paths of a message differ from run to run."""


def test_messages_shown_are_the_codes() -> None:
    shown = "".join(re.findall(r"^```text\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
    files = (file for folder in ("clap_ds", "launch") for file in (ROOT / folder).rglob("*.py"))
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    code = "\n".join(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    phrases = WORDS.findall(shown)
    assert len(phrases) > 10
    # The first two words may be a replacement field: "the loss".
    assert [phrase for phrase in phrases if phrase.split(" ", 2)[2] not in code] == []
