"""Regular expressions for text of others take time in proportion to it: a stranger's 100 KB may not stop a command."""

import ast
import contextlib
import importlib
import itertools
import json
import re
import re._constants as codes
import re._parser as parser
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clap_ds.analysis.log_formats import DIALECTS
from clap_ds.analysis.table import plain_text
from clap_ds.analysis.training_log import Log
from clap_ds.config.errors import UserError, printable
from clap_ds.config.files import parse_json, refuse_duplicates
from clap_ds.config.paths import PACKAGE
from clap_ds.config.redaction import redacted, redacted_all
from clap_ds.data.build_shards import caption_lists
from clap_ds.distributed.hostfile import expand, parse_tasks

LENGTH = 100_000
LIMIT_S = 0.5
ROOT = PACKAGE.parent
CATEGORIES = {
    codes.CATEGORY_DIGIT: "1", codes.CATEGORY_SPACE: " ", codes.CATEGORY_WORD: "a", codes.CATEGORY_NOT_SPACE: "a",
    codes.CATEGORY_NOT_DIGIT: "a", codes.CATEGORY_NOT_WORD: ".",
}  # fmt: skip
COMPUTED = {"clap_ds/data/build_shards/caption_lists.py", "clap_ds/config/errors.py", "launch/slurm.py"}
"""Modules with a pattern that a function computes: of a list's delimiter (in `FUNCTIONS`), else of this project's words."""
OF_OWN_TEXT = {"clap_ds/config/reference.py", "clap_ds/run_records/environment.py"}


def modules() -> Iterator[Path]:
    for folder in ("clap_ds", "analysis", "launch"):
        for path in (ROOT / folder).rglob("*.py"):
            name = str(path.relative_to(ROOT))
            is_linked = name.startswith(("clap_ds/analysis/", "clap_ds/launch/"))
            if not is_linked and name not in OF_OWN_TEXT and re.search(r"^import re$", path.read_text(), re.MULTILINE):
                yield path.relative_to(ROOT)


def compiled_in(value: object) -> Iterator[re.Pattern[Any]]:
    """Yield the patterns in a module's variable."""
    if isinstance(value, re.Pattern):
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from compiled_in(part)


def collect(path: Path) -> tuple[dict[re.Pattern[Any], bool], int]:
    """Return a module's patterns, whether they are searched for anywhere in a text, and how many calls have computed ones."""
    name = ".".join(path.with_suffix("").parts)
    module = importlib.import_module(name if name.startswith("clap_ds") else f"clap_ds.{name}")
    source = (ROOT / path).read_text()
    patterns: dict[re.Pattern[Any], bool] = {}
    for variable, value in vars(module).items():
        methods = set(re.findall(rf"\b{variable}\.(\w+)\(", source))
        for pattern in compiled_in(value):
            patterns[pattern] = not methods or not methods <= {"fullmatch", "match"}
    num_computed = 0
    for call in ast.walk(ast.parse(source)):
        if not (isinstance(call, ast.Call) and ast.unparse(call.func).startswith("re.") and call.args):
            continue
        try:
            pattern = re.compile(eval(ast.unparse(call.args[0]), vars(module)))
        except (NameError, AttributeError):
            num_computed += path != Path("analysis/log_formats.py")  # all of its patterns are in its tables
        else:
            patterns.setdefault(pattern, ast.unparse(call.func) not in ("re.fullmatch", "re.match", "re.compile"))
    return patterns, num_computed


def parts_of(tree: Any) -> Iterator[str]:
    """Yield short texts that the parts of a pattern match, in order; of alternatives all."""
    literal = ""
    for code, argument in tree:
        if code is codes.LITERAL:
            literal += chr(argument)
            continue
        if literal:
            yield literal
            literal = ""
        if code is codes.BRANCH:
            for alternative in argument[1]:
                yield "".join(parts_of(alternative))
        elif code in (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT):
            yield "".join(parts_of(argument[2])) * max(argument[0], 1)
        elif code in (codes.SUBPATTERN, codes.ASSERT, codes.ATOMIC_GROUP):
            yield from parts_of(argument if code is codes.ATOMIC_GROUP else argument[-1])
        elif code is codes.IN:
            kind, value = argument[0]
            if kind is codes.CATEGORY:
                yield CATEGORIES[value]
            elif kind is codes.NEGATE:
                yield "a"
            else:
                yield chr(value if kind is codes.LITERAL else value[0])
        elif code in (codes.ANY, codes.NOT_LITERAL):
            yield "x"
    if literal:
        yield literal


def texts_for(pattern: re.Pattern[Any]) -> Iterator[Any]:
    """Yield texts that repeat beginnings of what matches, and repeat one part behind such a beginning."""
    parts = [part for part in parts_of(parser.parse(pattern.pattern, pattern.flags & ~re.DEBUG)) if part]
    starts = ["".join(parts[:number]) for number in range(1, len(parts) + 1)]
    atoms = dict.fromkeys([*parts, " ", "a", "1", "-"])
    repeated = dict.fromkeys([*starts, *atoms, *map("".join, itertools.pairwise(parts))])
    pairs = [("", text) for text in repeated]
    pairs += [(start, atom) for start, after in zip(starts, parts[1:], strict=False) for atom in (after, parts[0], " ")]
    for start, repeat in dict.fromkeys(pairs):
        text = (start + repeat * (LENGTH // len(repeat) + 1))[:LENGTH]
        yield text.encode("latin-1") if isinstance(pattern.pattern, bytes) else text


def cpu_s(function: Callable[[Any], object], argument: Any) -> float:
    started_s = time.process_time()
    with contextlib.suppress(ValueError):
        function(argument)
    return time.process_time() - started_s


def list_all() -> dict[re.Pattern[Any], bool]:
    patterns = {re.compile(dialect.pattern): True for dialect in DIALECTS.values()}
    for path in modules():
        found, num_computed = collect(path)
        assert num_computed <= (str(path) in COMPUTED) * 2, (
            f"{path}: make its pattern a constant, so that this test tries it"
        )
        patterns |= found
    return patterns


def test_no_pattern_takes_long_on_its_own_literals_repeated() -> None:
    slow = []
    patterns = list_all()
    assert len(patterns) > 80
    for pattern, is_searched in patterns.items():
        apply = (lambda text, pattern=pattern: [*pattern.finditer(text)]) if is_searched else pattern.fullmatch
        for text in texts_for(pattern):
            if (seconds := cpu_s(apply, text)) > LIMIT_S:
                slow.append((round(seconds, 1), pattern.pattern, text[:200]))
                break
    assert slow == []


def merge_rows(num_rows: int) -> object:
    rows = (
        ("sound.wav", caption_lists.Entry(Path("sound.wav"), [f"caption {row}"], {"id": row}))
        for row in range(num_rows)
    )
    return caption_lists.merge(rows)


def read_caption_list(text: str) -> object:
    return [*caption_lists._csv_rows(Path("list.csv"), f'path,caption\n"{text}')]


COLUMNS = [f"caption_{number}" for number in range(30_000)]
FUNCTIONS: dict[str, Callable[[str], object]] = {
    "redacted": redacted,
    "redacted_all": lambda text: redacted_all({"a": [text]}),
    "printable": printable,
    "UserError": UserError,
    "plain_text": plain_text,
    "node list": expand,
    "many nodes": lambda text: expand(",".join(f"{text[:5]}{node}" for node in range(20_000))),
    "tasks": parse_tasks,
    "caption list": read_caption_list,
    "rows of a file": lambda text: merge_rows(20_000),
    "fields": lambda text: refuse_duplicates([(f"{text[:5]}{field}", 0) for field in range(50_000)] + [("a", 0)] * 2),
    "headings": lambda text: caption_lists._headings(
        Path("list.csv"), [f"{text[:5]}{column}" for column in range(30_000)]
    ),
    "captions": lambda text: caption_lists._divided(dict.fromkeys(COLUMNS, text[:5]), COLUMNS, []),
    "log": lambda text: Log().read(text),
    "JSON": lambda text: parse_json(json.dumps([text])),
}
REPEATED = (
    "-token", "http://x?token", "?token=", "://a@", "a://@", "token: ", "--password ", "sk-a", "eyJa.", "-eyJ", "hf_",
    "Bearer ", "n[1-2],", "n1,", "[", "]", ",", "n[1-1", '"', '"a",', '""', "'a", "](", "<a", "\x1b[", "\n", "a/", " ", "é",
    "CANCELLED AT",     "global batch size 1", "Epoch 0: 1/1 [", "4(x2),",
)  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_for_text_of_others_are_fast(name: str) -> None:
    for repeated in REPEATED:
        text = repeated * (LENGTH // len(repeated))
        assert cpu_s(FUNCTIONS[name], text) < LIMIT_S, f"{name}: {repeated!r} repeated"
        if name in ("many nodes", "rows of a file", "fields", "headings", "captions"):
            break
