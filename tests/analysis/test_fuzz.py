"""Whatever is given to a command of analysis/, it ends with a result or with one message and exit code 2; never a traceback.

Made-up logs, records and tables, damaged in the ways that real ones are, and in others. The same examples each time; more of
them, and others, with CLAP_FUZZ_EXAMPLES=1000.
"""

import contextlib
import io
import json
import os
import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clap_ds.analysis import compare, cost, efficiency, project
from clap_ds.config.errors import USER_ERROR, UserError, exit_code_of
from tests.analysis.samples import DATA, TINY, running_log, write
from tests.analysis.test_training_log import windows

EXAMPLES = int(os.environ.get("CLAP_FUZZ_EXAMPLES", "0"))
fuzzed = settings(
    max_examples=EXAMPLES or 40, derandomize=not EXAMPLES, deadline=None, database=None, report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip

GIVEN = ("--nodes", "1", "--gpus", "2", "--model", "htsat_tiny_roberta_base", "--peak_tflops", "989")
EFFICIENCY = {"efficiency": (efficiency.main, (*GIVEN, "--csv", "{out}/table.csv", "--markdown", "{out}/table.md"))}
TABLES: dict[str, tuple[Callable[[], None], Sequence[str]]] = {
    "cost": (cost.main, ("--samples", "1e9", "--deadline_hours", "3")),
    "project": (project.main, ("--num_parameters", "1e8", "--joint_dim", "512")),
    **EFFICIENCY,
}


def ends_well(main: Callable[[], None], *arguments: object) -> str:
    """Run a command, as its script does; what it printed, after an end as it should be."""
    out, err = io.StringIO(), io.StringIO()
    command = ["command", *map(str, arguments)]
    with (
        mock.patch.object(sys, "argv", command),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        code = exit_code_of(main, (UserError, OSError))
    if code:
        assert code == USER_ERROR, err.getvalue()
        last = err.getvalue().splitlines()[-1]
        assert last.startswith(("error: ", "       ")), err.getvalue()
    out.getvalue().encode()  # can be printed
    return out.getvalue()


def all_end_well(commands: Mapping[str, tuple[Callable[[], None], Sequence[str]]], *inputs: Path) -> None:
    with tempfile.TemporaryDirectory() as out:
        for main, options in commands.values():
            ends_well(main, *inputs, *(option.format(out=out) for option in options))


ODD = st.sampled_from(
    ["", "0", "-1", "nan", "inf", "1e999", "9" * 400, "0..5", "1,2", "x", "\0", "\ud800", "$a_b^{", "é|\n", " "]
)


def damaged(text: str, generator: random.Random, odd: str) -> bytes:
    """A text with cuts, repetitions, swaps and replaced numbers and bytes."""
    content = bytearray(text.encode("utf-8", "replace"))
    for _ in range(generator.choice((0, 1, 3, 10))):
        at, until = sorted(generator.randrange(len(content) + 1) for _ in range(2))
        until = min(until, at + generator.choice((1, 8, 200, 5000)))
        kind = generator.randrange(5)
        digits = [place for place, byte in enumerate(content) if 48 <= byte < 58]
        if kind == 0 and digits:
            place = generator.choice(digits)
            content[place : place + generator.randrange(1, 6)] = odd.encode("utf-8", "replace")
        elif kind == 1:
            del content[at:until]
        elif kind == 2:
            content[at:at] = content[at:until]
        elif kind == 3:
            content[at:until] = generator.randbytes(min(until - at, 8))
        else:
            del content[until:]
    return bytes(content)


LOGS = [
    (DATA / "deepspeed_2ranks.log").read_text(), (DATA / "deepspeed_failed.log").read_text(), running_log([1.0] * 40),
    "run directory: x\n" + windows(99.0, 98.5),
    "".join(f"| Train Epoch: 0 [ {616 * n}/9999 (1%)] Batch (t): 0.5, 1232./s, 616./s/gpu LR: 1\n" for n in range(1, 30, 4)),
]  # fmt: skip


@fuzzed
@given(st.sampled_from(LOGS), st.randoms(use_true_random=False), ODD)
def test_logs(text: str, generator: random.Random, odd: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        log = write(Path(folder) / "slurm-1.out", damaged(text, generator, odd))
        all_end_well(EFFICIENCY, log)


NUMBERS = st.one_of(st.integers(), st.floats(), st.just(10**400), st.sampled_from([0, -1, 1e-300, 1e300, 2**63]))
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=8), ODD),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)
RECORD = {
    path.name: path.read_text() for path in (DATA / "record_2ranks").iterdir() if path.suffix in (".json", ".jsonl")
}


def changed(value: Any, generator: random.Random, odd: Any) -> Any:
    """JSON with some of its values, at any depth, replaced by odd ones."""
    if generator.random() < 0.06:
        return odd
    if isinstance(value, dict):
        return {name: changed(inner, generator, odd) for name, inner in value.items()}
    return [changed(inner, generator, odd) for inner in value] if isinstance(value, list) else value


def damaged_record(folder: Path, generator: random.Random, odd: str, value: Any) -> Path:
    """A run directory, some of whose files are missing, cut or have odd values."""
    folder.mkdir(exist_ok=True)
    for name, text in RECORD.items():
        lines = text.splitlines() if name.endswith(".jsonl") else [text]
        if generator.random() < 0.7:
            text = "\n".join(json.dumps(changed(json.loads(line), generator, value)) for line in lines)
        if generator.random() < 0.9:
            write(folder / name, damaged(text, generator, odd) if generator.random() < 0.3 else text.encode())
    return folder


@fuzzed
@given(st.randoms(use_true_random=False), ODD, VALUES)
def test_records(generator: random.Random, odd: str, value: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        record = damaged_record(Path(folder) / "run-1", generator, odd, value)
        whole = damaged_record(Path(folder) / "run-2", random.Random(0), "", 1)
        all_end_well(EFFICIENCY, Path(folder))
        ends_well(compare.main, record, whole)


CELLS = st.one_of(
    ODD, st.sampled_from(["1", "4", "16", "1,024", "1.234,5", "97.3 %", "600.5", "1e5", "completed", "Total", "–"])
)
HEADERS = [*TINY.read_text().splitlines()[0].split(","), "model", "batch_per_gpu", "Step time (ms)", "peak_tflops", ""]


@st.composite
def tables(draw: st.DrawFn) -> bytes:
    """Published tables with odd cells, and tables of odd cells altogether."""
    delimiter, encoding = (
        draw(st.sampled_from(",;\t|")),
        draw(st.sampled_from(["utf-8", "utf-16", "cp1252", "utf-8-sig"])),
    )
    rows = [line.split(",") for line in TINY.read_text().splitlines()]
    if draw(st.booleans()):
        rows = [draw(st.permutations(HEADERS)), *draw(st.lists(st.lists(CELLS, max_size=10), max_size=6))]
    for _ in range(draw(st.integers(0, 3))):
        row = draw(st.sampled_from(rows))
        if row:
            row[draw(st.integers(0, len(row) - 1))] = draw(CELLS)
    return "\n".join(delimiter.join(row) for row in rows).encode(encoding, "replace")


@fuzzed
@given(tables())
def test_tables(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        table = write(Path(folder) / "table.csv", content)
        all_end_well(TABLES, table)
        ends_well(compare.main, table, TINY)


def test_the_whole_samples_end_with_results(tmp_path: Path) -> None:
    """What the others damage is read when it isn't damaged; otherwise they would try nothing."""
    for number, text in enumerate(LOGS):
        ends = [ends_well(efficiency.main, write(tmp_path / f"{number}.out", text), *GIVEN)]
        assert all("samples/s/GPU" in end or "failed" in end for end in ends)
    record = damaged_record(tmp_path / "run", random.Random(3), "", 1)
    assert "samples/s/GPU" in ends_well(efficiency.main, DATA / "record_2ranks")
    assert record.is_dir()
    assert "GPU-hours" in ends_well(cost.main, TINY, "--samples", "1e9")
    assert "htsat-tiny-roberta-base" in ends_well(efficiency.main, TINY)
