"""Tables are read as they were written, and other files are rejected."""

import re

import pytest

from clap_ds.analysis.runs import read_runs
from clap_ds.analysis.table import (
    COLUMNS,
    FORMER_COLUMNS,
    Row,
    markdown_table,
    read_table_runs,
    write_csv,
)
from clap_ds.utils.errors import UserError
from tests.analysis.samples import TINY, make_options, write

HEADER = TINY.read_text().splitlines(keepends=True)[0]


def test_written_table_is_read_equally_and_begins_as_published(tmp_path):
    common = {"model": "micro", "state": "x"}
    rows = [
        Row(1, 4, 623.7, 2494.8, 21.0, 100.0, uncertainty_from="2σ over 3 repeats", **common),
        Row(2, 8, model="micro", scaling="weak", state="out_of_memory", notes="a, b; “c”"),
        Row(4, 16, 0.05321, 0.85136, forward_s=0.25, data_wait_s=0.0, context_length=77, **common),
    ]
    write_csv(tmp_path / "t.csv", rows)
    for row, read in zip(rows, read_table_runs(tmp_path / "t.csv"), strict=True):
        assert {name: getattr(read, name) for name in COLUMNS} == pytest.approx(vars(row))
    published = HEADER.strip().split(",")
    assert [FORMER_COLUMNS.get(name, name) for name in published] == [*COLUMNS[:6]]


def test_former_names_of_columns_are_read(tmp_path):
    names = "nodes,gpus,samples_per_s_per_gpu,samples_per_s_per_gpu_2sigma,scaling_efficiency_2sigma_percent"
    text = f"{names},mfu_percent,engine_samples_per_s_per_gpu\n1,4,100,2.5,0.5,20.5,110\n"
    (run,) = read_table_runs(write(tmp_path / "old.csv", text))
    assert (run.samples_per_s_per_gpu_ci95, run.scaling_efficiency_percent_ci95) == (2.5, 0.5)
    assert (run.mfu_published_percent, run.deepspeed_samples_per_s_per_gpu) == (20.5, 110)


NAMES = "nodes,gpus,samples_per_s_per_gpu"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a CSV table"),
        (HEADER, "no rows"),
        (HEADER + "1,4,fast,2,3,4\n", "row 1: samples_per_s_per_gpu is 'fast'"),
        (HEADER + "1.5,4,3,40,3,100\n", "nodes is 1.5; expected a whole number"),
        (HEADER + ",4,3,40,3,100\n", "nodes or gpus is empty"),
        (HEADER + "1,4,1,234.5,4938,3,100\n", "row 1: more cells than the header"),
        (f"{NAMES},samples_per_s_per_gpu\n1,4,600,7\n", "samples_per_s_per_gpu appears twice"),
        (b"\x89PNG\xff\xfe\0", "not a CSV table"),
    ],
)
def test_bad_table_is_rejected_with_row_and_column(tmp_path, text, message):
    path = write(tmp_path / "bad.csv", text)
    with pytest.raises(UserError, match=rf"bad\.csv.*{message}"):
        read_table_runs(path)


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("utf-8-sig", f"{NAMES},,\n1,4,600.5,,\n\n2,8,580\n,,,\n"),
        ("utf-8", "nodes, gpus, samples_per_s_per_gpu\r\n1, 4, 600.5\r\n2, 8, 580\r\n"),
        ("utf-16", '\n"sep=;"\n\nnodes;gpus;samples_per_s_per_gpu\n1;4;600,5\n2;8;580\n'),
        ("utf-8", "nodes\tgpus\tsamples_per_s_per_gpu\r1\t4\t600.5\r2\t8\t580\r"),
    ],
)
def test_table_of_a_spreadsheet_is_read(tmp_path, text, encoding):
    rows = read_runs([write(tmp_path / "T.TSV", text.encode(encoding))], make_options())
    assert [(row.nodes, row.gpus, row.rate) for row in rows] == [(1, 4, 600.5), (2, 8, 580.0)]


def test_rate_is_the_middle_of_the_range_of_both_printed_columns(tmp_path):
    text = HEADER + "4,16,616.5,9865,,\n1,4,10.0,99,,\n"
    agreeing, contradicting = read_table_runs(write(tmp_path / "t.csv", text))
    assert agreeing.rate == pytest.approx((9864.5 / 16 + 616.55) / 2)
    assert contradicting.rate == 10.0
    assert (agreeing.notes, "contradicts" in contradicting.notes) == ("", True)


def test_markdown_has_dashes_for_gaps_and_no_markup_of_records():
    row = Row(1, 4, model="![x](http://a.b)", device="<img src=a>|`b`\n")
    assert row.title == "![x] (http://a.b), ‹img src=a>¦'b' "
    table = markdown_table(("a", "bb", "c"), [("1", "", ""), ("2", "3", "")])
    assert table.splitlines() == ["| a | bb |", "| : | -: |", "| 1 |  – |", "| 2 |  3 |"]


def test_formulas_in_a_table_are_text_and_come_back(tmp_path):
    texts = {"device": "@SUM(A1)", "variant": "-2+3", "notes": "'quoted"}
    write_csv(tmp_path / "t.csv", [Row(1, 4, 5.0, model="=1+1", speedup=1e-7, **texts)])
    assert not re.search(r"(^|,)[=@+-]", (tmp_path / "t.csv").read_text(), re.MULTILINE)
    (run,) = read_table_runs(tmp_path / "t.csv")
    assert {name: getattr(run, name) for name in texts} == texts
    assert run.speedup == 1e-7
