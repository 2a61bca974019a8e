"""Tables: what is written is what is read, and nothing that isn't a table is taken for one."""

from pathlib import Path

import pytest

from clap_ds.analysis.csv_table import read_table, read_table_runs
from clap_ds.analysis.runs import read_runs
from clap_ds.analysis.table import COLUMNS, Row, markdown_table, significant, unit, write_csv
from clap_ds.config.errors import UserError
from tests.analysis.samples import TINY, given, write

HEADER = TINY.read_text().splitlines(keepends=True)[0]


def test_a_table_survives_writing_and_reading_and_begins_as_the_published_do(tmp_path: Path) -> None:
    rows = [
        Row(1, 4, 623.7, 2495.0, 21.0, 100.0, 3.215, 0.0, "2σ over 3 repeats", 3, 1.0, model="micro", scaling="weak"),
        Row(2, 8, model="micro", scaling="weak", state="out_of_memory", notes="a, b; “c”"),
        Row(3, 9, model="=HYPERLINK(1)", device="@SUM(1)", notes="-1+1", scaling="weak"),
        Row(4, 16, 0.05321, 0.8514, forward_s=0.25, data_wait_s=0.0, model="micro", text_tokens=77, batch_per_gpu=4),
    ]
    write_csv(tmp_path / "t.csv", rows)
    assert read_table(tmp_path / "t.csv") == rows
    written = (tmp_path / "t.csv").read_text()
    assert all(f"'{formula}" in written for formula in ("=HYPERLINK(1)", "@SUM(1)", "-1+1"))
    assert ",".join(COLUMNS[:6]) + "\n" == HEADER
    with pytest.raises(AssertionError, match="nan"):
        write_csv(tmp_path / "t.csv", [Row(1, 4, float("nan"))])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        (HEADER, "no rows"),
        ("a,b\n1,2\n", "no column nodes, gpus, samples_per_s_per_gpu; .* in samples/s; this one has 'a', 'b'"),
        ("nodes,gpus,Throughput (tokens/s)\n1,2,3\n", "no column samples_per_s_per_gpu"),
        (HEADER + "1,4,fast,2,3,4\n", "line 2: samples_per_s_per_gpu is 'fast'"),
        (HEADER + "1,4,10,40,3,100\n2,8,0,0,0,0\n", "line 3: samples_per_s_per_gpu is 0"),
        (HEADER + "1,4,nan,40,3,100\n", "line 2: samples_per_s_per_gpu is nan"),
        (HEADER + "1,4,inf,40,3,100\n", "is inf"),
        (HEADER + "1,4,-3,40,3,100\n", "is -3"),
        (HEADER + "1.5,4,3,40,3,100\n", "nodes is 1.5; expected a whole number"),
        (HEADER + ",4,3,40,3,100\n", "nodes is empty"),
        (b"\x89PNG\xff\xfe\0", "binary"),
        (None, "can't be read"),
    ],
)
def test_a_bad_table_is_refused_by_line_and_column(tmp_path: Path, text: str | bytes | None, message: str) -> None:
    path = tmp_path / "bad.csv" if text is None else write(tmp_path / "bad.csv", text)
    with pytest.raises(UserError, match=rf"bad\.csv.*{message}"):
        read_table(path)


def test_the_rate_is_the_middle_of_what_both_printed_columns_allow(tmp_path: Path) -> None:
    path = write(tmp_path / "my_model.csv", HEADER + "4,16,616.5,9865,,\n1,4,10.0,99,,\n")
    agreeing, contradicting = read_table_runs(path)
    assert (agreeing.rate, agreeing.samples_per_s) == (pytest.approx((9864.5 / 16 + 616.55) / 2), 9865)
    assert (contradicting.rate, contradicting.samples_per_s) == (pytest.approx(10.0), None)
    assert agreeing.model == "my_model"  # a table without that column is named after its file


@pytest.mark.parametrize(
    ("value", "least", "text"),
    [(623.7, 1, "623.7"), (2494.8, 0, "2495"), (0.053214, 1, "0.05321"), (15124.2, 1, "15124.2"), (0.0, 0, "0")],
)
def test_significant(value: float, least: int, text: str) -> None:
    assert significant(value, least) == text


def test_text_of_others_is_no_markup() -> None:
    row = Row(1, 4, model="![x](http://a.b)", device="<img src=a>|`b`\n")
    assert row.title == "![x] (http://a.b), ‹img src=a>¦'b' "
    assert markdown_table(["a"], [[row.device]]).splitlines()[2] == "| ‹img src=a>¦'b'  |"


def test_markdown_shows_gaps_as_dashes() -> None:
    assert markdown_table(("a", "bb"), [("1", "")]).splitlines() == ["| a | bb |", "| : | -: |", "| 1 |  – |"]


PLAIN = """model,nodes,gpus,samples_per_s_per_gpu,samples_per_s,mfu_percent
m,1,4,623.7,2494.8,21.0
m,256,1024,544.6,557670.4,18.4
"""
EUROPEAN = """model;Nodes;GPUs;samples/s/GPU;samples/s;MFU (%)
m;1;4;623,7;2.494,8;21,0 %
m;256;1.024;544,6;557.670,4;18,4
"""


@pytest.mark.parametrize(
    "content",
    [
        PLAIN.encode("utf-8-sig"),
        PLAIN.encode("utf-16"),
        PLAIN.replace(",", "\t").encode(),
        PLAIN.replace("1024", '"1,024"').replace("557670.4", '"557,670.4"').replace("2494.8", '" 2,494.8 "').encode(),
        PLAIN.replace("m,1", "\n,,,,,\nm,1").replace("\n", "\r\n").encode(),
        EUROPEAN.replace("MFU (%)", "MFU %;größte Last").encode("cp1252"),
    ],
)
def test_tables_as_excel_saves_them(tmp_path: Path, content: bytes) -> None:
    assert read_table(write(tmp_path / "t.csv", content)) == read_table(write(tmp_path / "plain.csv", PLAIN))


def test_a_rate_of_all_gpus_stands_for_that_of_one(tmp_path: Path) -> None:
    assert read_table(write(tmp_path / "t.csv", "nodes,GPUs,samples/s\n2,8,492\n"))[0].rate == 61.5


def test_equal_rows_are_repeats_and_those_of_a_copy_are_not(tmp_path: Path) -> None:
    table = write(tmp_path / "t.csv", "nodes,gpus,samples_per_s_per_gpu\n" + 3 * "1,4,600\n" + "2,8,577\n")
    (tmp_path / "copy").mkdir()
    copy = write(tmp_path / "copy" / "t.csv", table.read_text())
    assert [run.nodes for run in read_runs([table, copy, table], given())] == [1, 1, 1, 2]


@pytest.mark.parametrize(
    ("cell", "rate"),
    [("1.234", 1.234), ('"1,234"', "is 1,234, which can be read in two ways"), ('"1,234,567"', 1234567.0),
     ('"1.234,5"', 1234.5), ("0..5", "'0..5'"), ("6.2e2", 620.0), ('"12,34"', 12.34), ("1e300", "can be measured"),
     ("1,234.5", "6 cells under 5")],
)  # fmt: skip
def test_a_number_is_read_in_the_one_way_it_can_be_or_refused(tmp_path: Path, cell: str, rate: float | str) -> None:
    path = write(tmp_path / "t.csv", f"nodes,gpus,samples_per_s_per_gpu,model,state\n1,4,{cell},m,completed\n")
    if isinstance(rate, float):
        assert read_table(path)[0].rate == rate
    else:
        with pytest.raises(UserError, match=rf"t\.csv, line 2.*{rate}"):
            read_table(path)


def test_what_ranks_run_on_is_named() -> None:
    names = ("NVIDIA H100 PCIe", "GH200", "Intel(R) Xeon(R) Processor", "AMD EPYC 9654")
    assert [unit(name) for name in names] == ["GPUs", "GPUs", "ranks", "ranks"]
    assert unit() == "GPUs"
