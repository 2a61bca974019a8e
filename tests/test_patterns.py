"""Regular expressions for text of others take time in proportion to it: a stranger's 100 KB may not
stop a command."""

import ast
import importlib
import itertools
import json
import re
import re._compiler as compiler
import re._constants as codes
import re._parser as parser
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from clap_ds.analysis.log_formats import LOG_FORMATS
from clap_ds.analysis.table import plain_text
from clap_ds.analysis.training_log import Log
from clap_ds.data.build_shards import caption_lists
from clap_ds.distributed.hostfile import expand, parse_tasks
from clap_ds.utils.errors import UserError, printable
from clap_ds.utils.files import parse_json, refuse_duplicates
from clap_ds.utils.paths import PACKAGE
from clap_ds.utils.redaction import redacted

LENGTH = 100_000
LIMIT_S = 0.5
COMPUTED = {
    "analysis/log_formats.py", "launch/attempt.py", "launch/preflight.py",
    "data/build_shards/caption_lists.py", "utils/errors.py",
}  # fmt: skip
"""Modules with patterns from tables (log formats are tried, too), of hosts' names, of this
project's words, and of a list's delimiter (in `FUNCTIONS`)."""
OF_OWN_TEXT = {"config/reference.py", "run_records/environment.py"}
REPEATS = (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT)
LETTERS = (codes.IN, codes.ANY, codes.NOT_LITERAL)


def is_slow(function: Callable[[Any], object], text: Any) -> bool:
    """Return whether 100 KB take too long. If a part, tried before, is fast enough, all is, even in
    quadratic time."""
    for share in (10, 3, 1):
        started_s = time.process_time()
        with suppress(ValueError):
            function(text[: LENGTH // share])
        if time.process_time() - started_s < LIMIT_S / share**2:
            return False
    return True


def compiled_in(value: object) -> Iterator[re.Pattern[Any]]:
    """Yield the patterns in a module's variable."""
    if isinstance(value, re.Pattern):
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from compiled_in(part)


def collect() -> tuple[dict[re.Pattern[Any], bool], set[str]]:
    """Return all patterns, whether they are searched for anywhere in a text, and the modules that
    have computed ones."""
    patterns = {re.compile(log_format.pattern): True for log_format in LOG_FORMATS.values()}
    computed = set()
    paths = {
        path for folder in ("", "analysis", "launch") for path in (PACKAGE / folder).rglob("*.py")
    }
    for path in sorted(paths):
        name = path.relative_to(PACKAGE)
        source = path.read_text()
        if "\nimport re\n" not in source or str(name) in OF_OWN_TEXT:
            continue
        module = importlib.import_module(".".join(["clap_ds", *name.with_suffix("").parts]))
        for variable, value in vars(module).items():
            methods = set(re.findall(rf"\b{variable}\.(\w+)\(", source))
            for pattern in compiled_in(value):
                patterns[pattern] = not methods or not methods <= {"fullmatch", "match"}
        for call in ast.walk(ast.parse(source)):
            if (
                isinstance(call, ast.Call)
                and ast.unparse(call.func).startswith("re.")
                and call.args
            ):
                try:
                    pattern = re.compile(eval(ast.unparse(call.args[0]), vars(module)))
                except NameError:
                    computed.add(str(name))
                else:
                    patterns.setdefault(
                        pattern,
                        ast.unparse(call.func) not in ("re.fullmatch", "re.match", "re.compile"),
                    )
    return patterns, computed


def parts_of(tree: Any) -> Iterator[str]:
    """Yield short texts that the parts of a pattern match, in order; of alternatives all."""
    for is_literal, nodes in itertools.groupby(tree, lambda node: node[0] is codes.LITERAL):
        if is_literal:
            yield "".join(chr(letter) for _, letter in nodes)
            continue
        for code, argument in nodes:
            if code is codes.BRANCH:
                yield from ("".join(parts_of(alternative)) for alternative in argument[1])
            elif code in REPEATS:
                yield "".join(parts_of(argument[2])) * max(argument[0], 1)
            elif code in (codes.SUBPATTERN, codes.ASSERT):
                yield from parts_of(argument[-1])
            elif code is codes.ATOMIC_GROUP:
                yield from parts_of(argument)
            elif code in LETTERS:
                letter = compiler.compile(parser.SubPattern(tree.state, [(code, argument)]))
                yield next(filter(letter.fullmatch, map(chr, (97, 49, *range(0x3000)))))


def texts_for(pattern: re.Pattern[Any]) -> Iterator[Any]:
    """Yield texts that repeat beginnings of what matches, and repeat one part behind such a
    beginning."""
    parts = [
        part for part in parts_of(parser.parse(pattern.pattern, pattern.flags & ~re.DEBUG)) if part
    ]
    starts = [*itertools.accumulate(parts)]
    pairs = [
        ("", text)
        for text in (*starts, *parts, " ", "a", "1", "-", *map("".join, itertools.pairwise(parts)))
    ]
    for start, following in zip(starts, parts[1:], strict=False):
        pairs += [(start, following), (start, parts[0]), (start, " ")]
    for start, repeated in dict.fromkeys(pairs):
        text = start + repeated * (LENGTH // len(repeated))
        yield text.encode("latin-1") if isinstance(pattern.pattern, bytes) else text


def test_no_pattern_takes_long_on_its_own_literals_repeated() -> None:
    patterns, computed = collect()
    assert computed <= COMPUTED, (
        "make these modules' patterns constants, so that this test tries them"
    )
    assert len(patterns) > 80
    slow = {}
    for pattern, is_searched in patterns.items():
        apply = (
            (lambda text, pattern=pattern: [*pattern.finditer(text)])
            if is_searched
            else pattern.fullmatch
        )
        slow[pattern.pattern] = next(
            (text[:200] for text in texts_for(pattern) if is_slow(apply, text)), None
        )
    assert {pattern: text for pattern, text in slow.items() if text} == {}


FUNCTIONS: dict[str, Callable[[str], object]] = {
    "redacted": redacted,
    "printable": printable,
    "UserError": UserError,
    "plain_text": plain_text,
    "node list": expand,
    "tasks": parse_tasks,
    "caption list": lambda text: [
        *caption_lists._csv_rows(Path("list.csv"), f'path,caption\n"{text}')
    ],
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
    slow = [text for text in REPEATED if is_slow(FUNCTIONS[name], text * (LENGTH // len(text)))]
    assert slow == []


def merge_rows(names: list[str]) -> object:
    entries = (
        caption_lists.Entry(Path("a"), [f"caption {name}"], {"id": name}) for name in names[:7_000]
    )
    return caption_lists.merge(("a", entry) for entry in entries)


@pytest.mark.parametrize(
    "function",
    [
        lambda nodes: expand(",".join(nodes)),
        lambda fields: refuse_duplicates([(name, 0) for name in [*fields, "a", "a"]]),
        lambda columns: caption_lists._headings(Path("list.csv"), columns),
        lambda columns: caption_lists._divided(dict.fromkeys(columns, "text"), columns, []),
        merge_rows,
    ],
)
def test_functions_for_many_names_of_others_are_fast(
    function: Callable[[list[str]], object],
) -> None:
    assert not is_slow(function, [f"name{number}" for number in range(20_000)])
