"""Whatever is given to a command of analysis/, it ends with a result or with one message and exit code 2; never a traceback.

Logs, records and tables with cuts, repetitions, odd numbers and bytes. The same examples each time.
"""

import random
import warnings
from pathlib import Path

import pytest

from clap_ds.analysis import compare, efficiency, project
from clap_ds.config.errors import USER_ERROR, UserError, exit_code_of
from tests.analysis.samples import DATA, TINY, command, running_log, write

OPTIONS = ("--nodes", "1", "--gpus", "2", "--peak_tflops", "989", "--csv", "t.csv")
LOGS = [
    (DATA / "deepspeed_2ranks.log").read_text(),
    (DATA / "deepspeed_failed.log").read_text(),
    running_log([1.0] * 40),
]
ODD = ["0", "-1", "nan", "1e999", "0..5", "1,2", "x", "\x00", "$a_b^{", "é|\n", "null", "[]", "true"]


def damaged(text: str, generator: random.Random) -> bytes:
    content = bytearray(text.encode(generator.choice(["utf-8"] * 4 + ["utf-16", "cp1252"]), "replace"))
    for _ in range(generator.choice((0, 1, 3, 10))):
        at = generator.randrange(len(content) + 1)
        until = min(len(content), at + generator.choice((1, 8, 200, 5000)))
        number = next((place for place, byte in enumerate(content[at:], at) if 48 <= byte < 58), at)
        odd = generator.choice(ODD).encode()
        begin, new = generator.choice(
            [(number, odd), (at, b""), (at, 2 * content[at:until]), (at, generator.randbytes(8))]
        )
        content[begin:until] = new
    return bytes(content)


def damaged_input(kind: str, path: Path, generator: random.Random) -> Path:
    if kind == "log":
        return write(path.with_suffix(".out"), damaged(generator.choice(LOGS), generator))
    if kind == "table":
        table = TINY.read_text().replace(",", generator.choice(",,;\t"))
        return write(path.with_suffix(".csv"), damaged(table, generator))
    path.mkdir()
    for file in (DATA / "record_2ranks").glob("*.json*"):
        write(path / file.name, damaged(file.read_text(), generator))
    return path


@pytest.mark.parametrize("kind", ["log", "record", "table"])
def test_damaged_input_ends_with_a_result_or_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    warnings.simplefilter("error")
    read = 0
    for example in range(40):
        path = damaged_input(kind, tmp_path / f"{kind}-{example}", random.Random(example))
        for main, others in ((efficiency.main, OPTIONS), (project.main, ()), (compare.main, (TINY,))):
            code = exit_code_of(lambda: command(monkeypatch, main, path, *others), (UserError, OSError))  # noqa: B023
            told, said = capsys.readouterr()
            told.encode()  # can be printed
            assert not code or (code == USER_ERROR and said.splitlines()[-1].startswith(("error: ", "       "))), said
            read += not code
    assert read >= 10  # of whole samples, at least
