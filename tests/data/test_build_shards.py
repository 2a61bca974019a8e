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
from clap_ds.data.shard_manifest import expand_shards, read_manifest, samples_of
from tests.data.builds import RATE, items_by_source, reasons_in, run, tone, write_list
from tests.data.tars import wav


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


@pytest.mark.parametrize(("num_first", "num_trial"), [(101, 100), (10, 10)])
def test_build_of_first_files_estimates_whole_list(tmp_path, capsys, num_first, num_trial):
    path = write_list(tmp_path, 130)
    (tmp_path / "audio" / "clip 05.wav").write_bytes(b"broken")
    assert run(path, tmp_path / "out", "--first", num_first) == 0
    printed = capsys.readouterr().out
    assert f"train: {num_first - 1} items" in printed
    pattern = rf"first {num_trial} files took (\S+) s: about (\S+) min for all 130\n"
    elapsed_s, total_min = map(float, re.search(pattern, printed).groups())
    assert total_min == pytest.approx(130 / num_trial * elapsed_s / 60, rel=0.02)


def test_clips_of_other_lengths_are_left_out_and_counted(tmp_path, capsys):
    """They don't count as broken."""
    path = write_list(tmp_path, 5)
    for number, seconds in enumerate((0.049, 0.101, 0.102)):
        content = wav(tone(number, seconds), RATE, "PCM_16")
        (tmp_path / "audio" / f"clip {number:02d}.wav").write_bytes(content)
    (tmp_path / "audio" / "clip 03.wav").write_bytes(b"broken")
    out = tmp_path / "out"
    lengths = ("--min_seconds", 0.05, "--max_seconds", 0.1)
    assert run(path, out, *lengths) == 0
    assert items_by_source(out).keys() == {"clip 04.wav"}
    assert reasons_in(out).keys() == {"clip 03.wav"}
    assert "5 clips: 1 shorter than 0.05 s, 2 longer than 0.1 s\n" in capsys.readouterr().out
    left_out = read_manifest(str(out)).left_out
    assert left_out == {"shorter than 0.05 s": 1, "longer than 0.1 s": 2}
    assert run(path, tmp_path / "none", "--min_seconds", 9, "--first", 2) == 2
    assert "no clip is left: 2 shorter" in capsys.readouterr().err


def test_parts_are_one_data_set(tmp_path, capsys):
    path = write_list(tmp_path, 11)
    out = tmp_path / "out"
    for number in (3, 1, 2):
        options = ("--held_out", 0.25, "--train_tokenizer", 300, "--shard_mb", 0.001)
        assert run(path, out, *options, "--part", f"{number}/3") == 0
    pattern = f"{out}/part-*-of-3/train-*.tar"
    assert pattern in capsys.readouterr().out
    shards = expand_shards([pattern, pattern.replace("train", "held_out")])
    assert len({Path(shard).name for shard in shards}) == len(shards)
    assert sum(samples_of(shards)) == 11
    # Each clip is in one part.
    assert len(items_by_source(out, "part-*-of-3/*.tar")) == 11
    tokenizers = {file.read_bytes() for file in out.glob("part-*/tokenizer/tokenizer.json")}
    assert len(tokenizers) == 1
    assert run(path, out, "--part", "1/12") == 2
    assert "only 11 items" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run(path, out, "--part", "0/3")
    assert "1/8 to 8/8" in capsys.readouterr().err


def test_part_without_held_out_fold_is_built(tmp_path, capsys):
    path = write_list(tmp_path, 4)
    heading, *rows = path.read_text().splitlines()
    # Each clip is a fold.
    rows = [f"{row},{number}" for number, row in enumerate(rows)]
    path.write_text("\n".join([f"{heading},fold", *rows]))
    options = ("--fold_column", "fold", "--held_out_fold")
    for number in range(1, 5):
        assert run(path, tmp_path / "out", *options, 2, "--part", f"{number}/4") == 0
    assert len([*(tmp_path / "out").rglob("held_out-*.tar")]) == 1
    assert run(path, tmp_path / "none", *options, 9, "--part", "1/4") == 2
    assert "no such value" in capsys.readouterr().err


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
