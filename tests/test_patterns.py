"""Regular expressions and functions for text of others take time in proportion to it.

100 KB from a stranger may not stop a command (`SECURITY.md`).
"""

import ast
import gc
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
from clap_ds.utils.redaction import redact

LENGTH = 100_000
LIMIT_S = 0.5
# Modules with patterns that are computed: of log formats, which are added below, of hosts' names,
# and of this project's words.
COMPUTED = {
    "analysis/log_formats.py", "launch/attempt.py", "utils/errors.py",
}  # fmt: skip
# modules with patterns for text of this project and the kernel
TRUSTED = {"config/reference.py", "run_records/environment.py"}
# functions that begin at a text's start; a compiled pattern's uses are tried by themselves
ANCHORED = ("re.fullmatch", "re.match", "re.compile")
REPEATS = (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT)
LETTERS = (codes.IN, codes.ANY, codes.NOT_LITERAL)


def is_slow(function: Callable[[Any], object], text: Any) -> bool:
    """Return whether 100 KB take too long."""
    # If a part is fast enough, the whole is, even in quadratic time. On a busy machine the first
    # attempts may be slow: caches are cold.
    for divisor in (10, 3, 1, 1, 1):
        # Other tests' objects would count.
        gc.disable()
        try:
            start_s = time.process_time()
            with suppress(ValueError):
                function(text[: LENGTH // divisor])
            time_s = time.process_time() - start_s
        finally:
            gc.enable()
        if time_s < LIMIT_S / divisor**2:
            return False
    return True


def find_patterns(value: object) -> Iterator[re.Pattern[Any]]:
    """Yield the compiled patterns in a module's variable."""
    if isinstance(value, re.Pattern):
        yield value
    elif isinstance(value, dict):
        yield from find_patterns([*value.values()])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from find_patterns(item)


def find_calls(source: str) -> Iterator[tuple[str, ast.expr]]:
    """Yield the function and the pattern of each call of a function of `re`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and node.args:
            function = ast.unparse(node.func)
            if function.startswith("re."):
                yield function, node.args[0]


def collect_patterns() -> tuple[dict[re.Pattern[Any], bool], set[str]]:
    """Return all patterns, each with whether it is searched for anywhere in a text, and the modules
    that have computed ones."""
    patterns = {re.compile(log_format.pattern): True for log_format in LOG_FORMATS.values()}
    computed = set()
    paths = {*PACKAGE.rglob("*.py")}
    # rglob doesn't follow links.
    for folder in ("analysis", "launch"):
        paths |= {*(PACKAGE / folder).rglob("*.py")}
    for path in sorted(paths):
        name = path.relative_to(PACKAGE)
        source = path.read_text()
        if "\nimport re\n" not in source or str(name) in TRUSTED:
            continue
        module = importlib.import_module(".".join(["clap_ds", *name.with_suffix("").parts]))
        for variable, value in vars(module).items():
            methods = set(re.findall(rf"\b{variable}\.(\w+)\(", source))
            is_searched = not methods or not methods <= {"fullmatch", "match"}
            patterns |= dict.fromkeys(find_patterns(value), is_searched)
        for function, expression in find_calls(source):
            try:
                pattern = re.compile(eval(ast.unparse(expression), vars(module)))
            except NameError:
                computed.add(str(name))
            else:
                patterns.setdefault(pattern, function not in ANCHORED)
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
    parts = [*filter(None, parts_of(parser.parse(pattern.pattern, pattern.flags & ~re.DEBUG)))]
    starts = [*itertools.accumulate(parts)]
    pairs = map("".join, itertools.pairwise(parts))
    # beginning, and the text that is repeated behind it
    texts = [("", repeated) for repeated in (*starts, *parts, " ", "a", "1", "-", *pairs)]
    for start, next_part in zip(starts, parts[1:], strict=False):
        texts += [(start, next_part), (start, parts[0]), (start, " ")]
    for start, repeated in dict.fromkeys(texts):
        text = start + repeated * (LENGTH // len(repeated))
        yield text.encode("latin-1") if isinstance(pattern.pattern, bytes) else text


def test_patterns_are_fast_on_their_own_literals_repeated():
    patterns, computed = collect_patterns()
    advice = "make these modules' patterns constants, so that this test tries them"
    assert computed <= COMPUTED, advice
    assert len(patterns) > 80
    for pattern, is_searched in patterns.items():

        def search(text: Any, pattern: re.Pattern[Any] = pattern) -> object:
            return [*pattern.finditer(text)]

        function = search if is_searched else pattern.fullmatch
        for text in texts_for(pattern):
            assert not is_slow(function, text), (pattern.pattern, text[:200])


FUNCTIONS: dict[str, Callable[[str], object]] = {
    "redacted": redact,
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
def test_function_for_text_of_others_is_fast(name):
    for text in REPEATED:
        assert not is_slow(FUNCTIONS[name], text * (LENGTH // len(text))), text


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
        lambda columns: caption_lists._parse_headings(Path("list.csv"), columns),
        lambda columns: caption_lists._split_row(dict.fromkeys(columns, "text"), columns, []),
        merge_rows,
    ],
)
def test_function_for_many_names_of_others_is_fast(function):
    assert not is_slow(function, [f"name{number}" for number in range(20_000)])
