"""Whatever is given to a command of analysis/, it ends with a result or with one message and exit code 2; never a traceback.

Logs, records and tables, damaged in the ways that real ones are, and in others. The same examples each time.
"""

import contextlib
import io
import json
import random
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from clap_ds.analysis import compare, efficiency, project
from clap_ds.config.errors import USER_ERROR, UserError, exit_code_of
from tests.analysis.samples import DATA, TINY, running_log, write

OPTIONS = ("--nodes", "1", "--gpus", "2", "--peak_tflops", "989", "--csv", "t.csv", "--markdown", "t.md")
LOGS = [
    (DATA / "deepspeed_2ranks.log").read_text(), (DATA / "deepspeed_failed.log").read_text(), running_log([1.0] * 40),
    "".join(f"| Train Epoch: 0 [ {616 * n}/9999 (1%)] Batch (t): 0.5, 1232./s, 616./s/gpu LR: 1\n" for n in range(1, 30, 4)),
]  # fmt: skip
ODD: list[Any] = [
    "", "0", "-1", "nan", "inf", "1e999", "9" * 400, "0..5", "1,2", "1.234,5", "x", "\0", "\ud800", "$a_b^{", "é|\n", " ",
    "Total", None, True, 10**400, -1, 1e-300, [], [1], {"a": []}, float("nan"),
]  # fmt: skip


def ends_well(main: Any, *arguments: object) -> str:
    """Run a command, as its script does; what it printed, after an end as it should be."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["command", *map(str, arguments)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        code = exit_code_of(main, (UserError, OSError))
    if code:
        assert code == USER_ERROR, err.getvalue()
        assert err.getvalue().splitlines()[-1].startswith(("error: ", "       ")), err.getvalue()
    out.getvalue().encode()  # can be printed
    return out.getvalue()


def damaged(text: str, generator: random.Random) -> bytes:
    """A text with cuts, repetitions, and replaced numbers and bytes, in some encoding."""
    content = bytearray(text.encode(generator.choice(["utf-8"] * 4 + ["utf-16", "cp1252"]), "replace"))
    for _ in range(generator.choice((0, 1, 3, 10))):
        at = generator.randrange(len(content) + 1)
        until = min(len(content), at + generator.choice((1, 8, 200, 5000)))
        odd = str(generator.choice(ODD)).encode("utf-8", "replace")
        number = next((place for place, byte in enumerate(content[at:], at) if 48 <= byte < 58), at)
        begin, new = generator.choice(
            [(number, odd), (at, b""), (at, 2 * content[at:until]), (at, generator.randbytes(8))]
        )
        content[begin:until] = new
    return bytes(content)


def changed(value: Any, generator: random.Random) -> Any:
    """JSON with some of its values, at any depth, replaced by odd ones."""
    if generator.random() < 0.06:
        return generator.choice(ODD)
    if isinstance(value, dict):
        return {name: changed(inner, generator) for name, inner in value.items()}
    return [changed(inner, generator) for inner in value] if isinstance(value, list) else value


@pytest.mark.parametrize("kind", ["log", "record", "table"])
def test_damaged_input_ends_with_a_result_or_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for example in range(25):
        generator, path = random.Random(example), tmp_path / f"{kind}-{example}"
        if kind == "record":
            path.mkdir()
            for file in (DATA / "record_2ranks").glob("*.json*"):
                texts = file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]
                lines = [json.dumps(changed(json.loads(text), generator)) for text in texts]
                write(path / file.name, damaged("\n".join(lines), generator))
        else:
            table = TINY.read_text().replace(",", generator.choice(",,;\t"))
            path = path.with_suffix(".csv" if kind == "table" else ".out")
            write(path, damaged(table if kind == "table" else generator.choice(LOGS), generator))
        ends_well(efficiency.main, path, *OPTIONS)
        ends_well(project.main, path)
        ends_well(compare.main, path, TINY if kind == "table" else DATA / "record_2ranks")


def test_the_whole_samples_end_with_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is damaged above is read when it isn't damaged; otherwise it would try nothing."""
    monkeypatch.chdir(tmp_path)
    for number, text in enumerate(LOGS):
        end = ends_well(efficiency.main, write(tmp_path / f"{number}.out", text), *OPTIONS)
        assert "samples/s/GPU" in end or "failed" in end
    assert "samples/s/rank" in ends_well(efficiency.main, DATA / "record_2ranks")
    assert "htsat-tiny-roberta-base" in ends_well(efficiency.main, TINY)
    assert "2048" in ends_well(project.main, TINY)
