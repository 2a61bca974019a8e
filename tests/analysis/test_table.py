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
        Row(
            1, 4, 623.7, 2495.0, 21.0, 100.0, 3.215, 0.0, "2σ over 3 repeats", 3, 1, 1.0, model="micro", scaling="weak"
        ),
        Row(2, 8, model="micro", scaling="weak", state="out_of_memory", notes="a, b; “c”"),
        Row(4, 16, 0.05321, 0.8514, forward_s=0.25, data_wait_s=0.0, model="micro", text_tokens=77, batch_per_gpu=4),
    ]
    write_csv(tmp_path / "t.csv", rows)
    assert read_table(tmp_path / "t.csv") == rows
    assert ",".join(COLUMNS[:6]) + "\n" == HEADER


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        (HEADER, "no rows"),
        ("a,b\n1,2\n", "no column nodes, gpus, samples_per_s_per_gpu; .* this one has a, b"),
        ("nodes,gpus,Throughput (tokens/s)\n1,2,3\n", "no column samples_per_s_per_gpu"),
        (HEADER + "1,4,fast,2,3,4\n", "line 2: samples_per_s_per_gpu is 'fast'"),
        (HEADER + "1,4,10,40,3,100\n\n2,8,0,0,0,0\n", "line 4: samples_per_s_per_gpu is 0"),
        (HEADER + "1,4,inf,40,3,100\n", "is inf"),
        (HEADER + "1,4,-3,40,3,100\n", "is -3"),
        (HEADER + "1.5,4,3,40,3,100\n", "nodes is 1.5; expected a whole number"),
        (HEADER + ",4,3,40,3,100\n", "nodes is empty"),
        (HEADER + "1,4,1,234.5,4938,3,100\n", "line 2, saw 7"),
        (HEADER + '1,4,"1,234",4938,3,100\n', "'1,234', which can be read in two ways"),
        ("nodes;gpus;samples/s/GPU;MFU (%)\n1;4;2.495;21,0\n", "'21,0', which can be read in two ways"),
        (b"\x89PNG\xff\xfe\0", "no CSV table"),
        (None, "can't be read"),
    ],
)
def test_a_bad_table_is_refused_by_line_and_column(tmp_path: Path, text: str | bytes | None, message: str) -> None:
    path = tmp_path / "bad.csv" if text is None else write(tmp_path / "bad.csv", text)
    with pytest.raises(UserError, match=rf"bad\.csv.*{message}"):
        read_table(path)


@pytest.mark.parametrize("mark", [",", ";", "\t"])
def test_headings_in_words_and_any_separator_are_read(tmp_path: Path, mark: str) -> None:
    text = "Nodes,GPUs,samples/s/GPU,MFU (%)\r\n1,4,623.7,21.0 %\r\n".replace(",", mark)
    (row,) = read_table(write(tmp_path / "my_model.csv", text.encode("utf-8-sig")))
    assert (row.nodes, row.gpus, row.rate, row.mfu_percent, row.model) == (1, 4, 623.7, 21.0, "my_model")
    assert read_table(write(tmp_path / "t.csv", "nodes,GPUs,samples/s\n2,8,492\n"))[0].rate == 61.5


def test_the_rate_is_the_middle_of_what_both_printed_columns_allow(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", HEADER + "4,16,616.5,9865,,\n1,4,10.0,99,,\n")
    agreeing, contradicting = read_table_runs(path)
    assert (agreeing.rate, agreeing.samples_per_s) == (pytest.approx((9864.5 / 16 + 616.55) / 2), 9865)
    assert (contradicting.rate, contradicting.samples_per_s) == (pytest.approx(10.0), None)


def test_equal_rows_are_repeats_and_those_of_a_copy_are_not(tmp_path: Path) -> None:
    table = write(tmp_path / "t.csv", "nodes,gpus,samples_per_s_per_gpu\n" + 3 * "1,4,600\n" + "2,8,577\n")
    (tmp_path / "copy").mkdir()
    copy = write(tmp_path / "copy" / "t.csv", table.read_text())
    assert [run.nodes for run in read_runs([table, copy, table], given())] == [1, 1, 1, 2]


@pytest.mark.parametrize(
    ("value", "least", "text"),
    [(623.7, 1, "623.7"), (2494.8, 0, "2495"), (0.053214, 1, "0.05321"), (15124.2, 1, "15124.2"), (0.0, 0, "0")],
)
def test_significant(value: float, least: int, text: str) -> None:
    assert significant(value, least) == text


def test_markdown_shows_gaps_as_dashes_and_no_markup_of_others() -> None:
    row = Row(1, 4, model="![x](http://a.b)", device="<img src=a>|`b`\n")
    assert row.title == "![x] (http://a.b), ‹img src=a>¦'b' "
    assert markdown_table(("a", "bb"), [("1", "")]).splitlines() == ["| a | bb |", "| : | -: |", "| 1 |  – |"]


def test_what_ranks_run_on_is_named() -> None:
    names = ("NVIDIA H100 PCIe", "GH200", "Intel(R) Xeon(R) Processor", "AMD EPYC 9654")
    assert [unit(name) for name in names] == ["GPUs", "GPUs", "ranks", "ranks"]
