"""Test the build command: from a list to training data, resuming and errors."""

import hashlib
import json
import re
from pathlib import Path

import pytest
import torch

from clap_ds.config.model import ClapConfig
from clap_ds.config.schema import ShardData
from clap_ds.data.clip import captions_of
from clap_ds.data.dataloader import build_batches
from tests.data.builds import items_by_source, run, write_list


def test_a_newcomer_can_train_on_the_result(
    tmp_path: Path, micro: ClapConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    """The printed settings load, held-out items are separate, and the manifest's counts match an
    epoch."""
    out = tmp_path / "out"
    path = write_list(tmp_path, 20, "audio/gone.wav,x\n")
    (tmp_path / "audio" / "clip 00.wav").write_bytes(b"broken")
    options = (
        path,
        out,
        "--held_out",
        0.25,
        "--shards",
        3,
        "--train_tokenizer",
        300,
        "--max_left_out",
    )
    assert run(*options, 0.09) == 1
    printed = capsys.readouterr()
    assert f"skipped 2, listed with reasons in {out}/broken.jsonl" in printed.out
    assert "--max_left_out" in printed.err
    assert "usable" in printed.err
    assert run(*options, 0.1) == 0
    train = items_by_source(out, "train-*.tar")
    held_out = items_by_source(out, "held_out-*.tar")
    assert len({**train, **held_out}) == len(train) + len(held_out) == 19
    assert len(list(out.glob("train-*.tar"))) == 3
    printed = capsys.readouterr().out
    assert f"train: {len(train)} items in 3 shard(s)" in printed
    settings = json.JSONDecoder().raw_decode(printed.partition('"data": ')[2])[0]
    data = ShardData.model_validate({**settings, "num_workers": 0})
    cpu = torch.device("cpu")
    with build_batches(data, model=micro, context_length=12, micro_batch=15, device=cpu) as source:
        next(source)
        assert (source.statistics()["epoch_samples"], source.statistics()["num_broken_items"]) == (
            len(train),
            0,
        )
    manifest = json.loads((out / "manifest.json").read_text())["shards"]
    for path in out.glob("*.tar"):
        assert manifest[path.name]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert sum(record["seconds"] for record in manifest.values()) == pytest.approx(19 * 0.05)


def test_a_trial_of_the_first_files_estimates_the_whole_list(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(write_list(tmp_path, 130), tmp_path / "out", "--first", 101) == 0
    printed = capsys.readouterr().out
    assert "train: 101 items" in printed
    took_s, minutes = map(
        float,
        re.search(r"first 100 files took (\S+) s: about (\S+) min for all 130\n", printed).groups(),
    )
    assert minutes == pytest.approx(1.3 * took_s / 60, rel=0.02)


def test_other_contents_and_other_lists_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_list(tmp_path, 3)
    out = tmp_path / "out"
    assert run(path, out) == 0
    assert run(path, out) == 0
    assert "1 of 1 shards already exist" in capsys.readouterr().out
    for folder, options, message in (
        (tmp_path / "audio", (), "isn't an empty folder"),
        (path / "out", (), "Not a directory"),
        (out, ("--kind", "waveform", "--preset", "micro"), "other options"),
        (out, ("--shards", 2), "other options"),
    ):
        assert run(path, folder, *options) == 2
        assert message in capsys.readouterr().err
    path.write_text(path.read_text().replace("a tone", "a sine"))
    assert run(path, out) == 2


@pytest.mark.parametrize(
    ("clips", "different", "is_few"), [(3, 1, 1), (1, 1, 0), (99, 2, 0), (150, 2, 1), (150, 3, 0)]
)
def test_captions_that_hardly_differ_are_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], clips: int, different: int, is_few: int
) -> None:
    heading, *rows = write_list(tmp_path, clips).read_text().splitlines()
    rows = [f"{row.partition(',')[0]},{number % different}" for number, row in enumerate(rows)]
    (tmp_path / "list.csv").write_text("\n".join([heading, *rows]))
    run(tmp_path / "list.csv", tmp_path / "out")
    assert (
        capsys.readouterr().err.count(f"only {different} different caption(s) among {clips} clips")
        == is_few
    )


def test_other_columns_named_like_captions_are_kept_and_not_read_as_captions(
    tmp_path: Path,
) -> None:
    path = write_list(tmp_path, 1)
    path.write_text("path,category,text,source\naudio/clip 00.wav,dog,a note,freesound\n")
    assert run(path, tmp_path / "out", "--caption_columns", "category") == 0
    (item,) = items_by_source(tmp_path / "out").values()
    assert captions_of(item) == ["dog"]
    described = json.loads(item["json"])
    assert (described["text_column"], described["source_column"]) == ("a note", "freesound")
