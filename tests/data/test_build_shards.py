"""Test the build command: from a list to training data, resuming and errors."""

import json
import re
from pathlib import Path

import pytest

from clap_ds.config.schema import ShardData
from clap_ds.data.build_shards.build import warn_of_few_captions
from clap_ds.data.build_shards.caption_lists import Entry
from clap_ds.data.clip import captions_of
from clap_ds.data.dataloader import build_batches
from tests.data.builds import items_by_source, run, write_list


def test_build_prints_settings_that_train(tmp_path, micro, capsys):
    """The printed settings load, and held-out items are separate."""
    out = tmp_path / "out"
    path = write_list(tmp_path, 20, "audio/gone.wav,x\n")
    (tmp_path / "audio" / "clip 00.wav").write_bytes(b"broken")
    options = ("--held_out", 0.25, "--shards", 3, "--train_tokenizer", 300)
    assert run(path, out, *options, "--max_left_out", 0.1) == 0
    train = items_by_source(out, "train-*.tar")
    held_out = items_by_source(out, "held_out-*.tar")
    assert len({**train, **held_out}) == len(train) + len(held_out) == 19
    printed = capsys.readouterr().out
    assert f"skipped 2, listed with reasons in {out}/broken.jsonl" in printed
    assert f"train: {len(train)} items in 3 shard(s)" in printed
    settings, _ = json.JSONDecoder().raw_decode(printed.partition('"data": ')[2])
    data = ShardData.model_validate({**settings, "num_workers": 0})
    with build_batches(data, model=micro, context_length=12, micro_batch=15) as source:
        next(source)
        statistics = source.statistics()
    assert statistics["epoch_samples"] == len(train)
    assert statistics["num_broken_items"] == 0


def test_build_with_too_many_skipped_exits_1_and_without_usable_file_2(tmp_path, capsys):
    path = write_list(tmp_path, 1, "audio/gone.wav,x\n")
    assert run(path, tmp_path / "out", "--max_left_out", 0.49) == 1
    assert "--max_left_out 0.49; the shards are usable" in capsys.readouterr().err
    (tmp_path / "audio" / "clip 00.wav").unlink()
    assert run(path, tmp_path / "none") == 2
    assert "none of 2 items are usable; the first: " in capsys.readouterr().err


def test_build_of_first_files_estimates_whole_list(tmp_path, capsys):
    assert run(write_list(tmp_path, 130), tmp_path / "out", "--first", 101) == 0
    printed = capsys.readouterr().out
    assert "train: 101 items" in printed
    estimate = re.search(r"first 100 files took (\S+) s: about (\S+) min for all 130\n", printed)
    elapsed_s, total_min = map(float, estimate.groups())
    assert total_min == pytest.approx(1.3 * elapsed_s / 60, rel=0.02)


def test_build_into_other_contents_is_refused(tmp_path, capsys):
    path = write_list(tmp_path, 3)
    out = tmp_path / "out"
    assert run(path, out) == 0
    assert run(path, out) == 0
    assert "1 of 1 shards already exist" in capsys.readouterr().out
    assert run(path, tmp_path / "audio") == 2
    assert "isn't an empty folder" in capsys.readouterr().err
    assert run(path, out, "--shards", 2) == 2
    assert "other options" in capsys.readouterr().err
    path.write_text(path.read_text().replace("a tone", "a sine"))
    assert run(path, out) == 2


@pytest.mark.parametrize(("num_captions", "warns"), [(1, True), (2, True), (3, False)])
def test_few_captions_are_warned_of(capsys, num_captions, warns):
    warn_of_few_captions([Entry(Path(), [str(number % num_captions)]) for number in range(150)])
    assert ("different caption(s) among 150 clips" in capsys.readouterr().err) == warns


def test_metadata_named_like_captions_is_renamed(tmp_path):
    path = write_list(tmp_path, 1)
    path.write_text("path,category,text,source\naudio/clip 00.wav,dog,a note,freesound\n")
    assert run(path, tmp_path / "out", "--caption_columns", "category") == 0
    (item,) = items_by_source(tmp_path / "out").values()
    assert captions_of(item) == ["dog"]
    fields = json.loads(item["json"])
    assert fields["text_column"] == "a note"
    assert fields["source_column"] == "freesound"
    # for zero-shot evaluation
    assert fields["category"] == "dog"
