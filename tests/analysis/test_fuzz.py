"""Whatever is given to a command of analysis/, it ends with a result or with one message and exit code 2; never a traceback.

Logs, records and tables, damaged in the ways that real ones are, and in others. The same examples each time.
"""

import json
import random
import warnings
from pathlib import Path
from typing import Any

import pytest

from clap_ds.analysis import compare, efficiency, project
from clap_ds.config.errors import USER_ERROR, UserError, exit_code_of
from tests.analysis.samples import DATA, TINY, command, running_log, write

OPTIONS = ("--nodes", "1", "--gpus", "2", "--peak_tflops", "989", "--csv", "t.csv")
LOGS = [
    (DATA / "deepspeed_2ranks.log").read_text(), (DATA / "deepspeed_failed.log").read_text(), running_log([1.0] * 40),
    "".join(f"| Train Epoch: 0 [ {616 * n}/9999 (1%)] Batch (t): 0.5, 1232./s, 616./s/gpu LR: 1\n" for n in range(1, 30, 4)),
]  # fmt: skip
ODD: list[Any] = [
    "", "0", "-1", "nan", "inf", "1e999", "9" * 400, "0..5", "1,2", "1.234,5", "x", "\0", "\ud800", "$a_b^{", "é|\n", " ",
    "Total", None, True, 10**400, -1, 1e-300, [], [1], {"a": []}, float("nan"),
]  # fmt: skip


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


def damaged_input(kind: str, path: Path, generator: random.Random) -> Path:
    if kind == "log":
        return write(path.with_suffix(".out"), damaged(generator.choice(LOGS), generator))
    if kind == "table":
        table = TINY.read_text().replace(",", generator.choice(",,;\t"))
        return write(path.with_suffix(".csv"), damaged(table, generator))
    path.mkdir()
    for file in (DATA / "record_2ranks").glob("*.json*"):
        texts = file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]
        lines = [json.dumps(changed(json.loads(text), generator)) for text in texts]
        write(path / file.name, damaged("\n".join(lines), generator))
    return path


@pytest.mark.parametrize("kind", ["log", "record", "table"])
def test_damaged_input_ends_with_a_result_or_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    warnings.simplefilter("error")
    read = 0
    for example in range(25):
        path = damaged_input(kind, tmp_path / f"{kind}-{example}", random.Random(example))
        for main, others in ((efficiency.main, OPTIONS), (project.main, ()), (compare.main, (TINY,))):
            code = exit_code_of(lambda: command(monkeypatch, main, path, *others), (UserError, OSError))  # noqa: B023
            told, said = capsys.readouterr()
            told.encode()  # can be printed
            assert not code or (code == USER_ERROR and said.splitlines()[-1].startswith(("error: ", "       "))), said
            read += not code
    assert read >= 10  # of whole samples, at least
