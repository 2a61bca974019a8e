import contextlib
import hashlib
import io
import json
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from clap_ds.config.model import ClapConfig
from clap_ds.config.sections import ShardData
from clap_ds.data.sources import build_batches
from tests.data.builds import RATE, items_by_source, run, tone, write_clips, write_list
from tests.data.tars import wav


def test_a_folder_gives_the_same_as_a_list(tmp_path: Path) -> None:
    """Audio files as they are; one or several captions, and whatever else is said."""
    folder = tmp_path / "audio"
    names = write_clips(folder, 4)
    captions = {name: [f"tone {n}", f"sine {n}"] for n, name in enumerate(names)}
    for n, name in enumerate(names):
        if n % 2:
            (folder / name).with_suffix(".txt").write_text("\n".join([*captions[name], ""]))
        else:
            (folder / name).with_suffix(".json").write_text(json.dumps({"captions": captions[name]}))
    lines = [json.dumps({"path": str(folder / name), "captions": captions[name]}) for name in names]
    (tmp_path / "list.jsonl").write_text("\n".join(lines))
    assert run(tmp_path / "list.jsonl", tmp_path / "a") == 0
    assert run(folder, tmp_path / "b", "--workers", 3) == 0
    items = items_by_source(tmp_path / "a")
    assert {name: json.loads(item["json"])["caption"] for name, item in items.items()} == captions
    assert {name: item["wav"] for name, item in items.items()} == {name: (folder / name).read_bytes() for name in names}
    assert items == items_by_source(tmp_path / "b")


def test_a_newcomer_can_train_on_the_result(
    tmp_path: Path, micro: ClapConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    """The printed settings load; held-out items are apart; the manifest's counts are those of an epoch."""
    out = tmp_path / "out"
    assert run(write_list(tmp_path, 20), out, "--held_out", 0.25, "--shards", 3, "--train_tokenizer", 300) == 0
    train, held_out = items_by_source(out, "train-*.tar"), items_by_source(out, "held_out-*.tar")
    assert (len(train), len(held_out), len({**train, **held_out})) == (15, 5, 20)
    assert len(list(out.glob("train-*.tar"))) == 3
    printed = capsys.readouterr().out
    assert (
        "tokenizer of 293 tokens for a model trained from nothing, of preset demo, htsat_base_roberta_base" in printed
    )
    settings = json.JSONDecoder().raw_decode(printed.partition('"data": ')[2])[0]
    data = ShardData.model_validate({**settings, "num_workers": 0})
    with build_batches(
        data, model=micro, text_tokens=12, micro_batch=15, rank=0, world_size=1, seed=0, device=torch.device("cpu")
    ) as source:
        next(source)
        assert (source.statistics()["epoch_samples"], source.statistics()["num_broken_items"]) == (15, 0)
    manifest = json.loads((out / "manifest.json").read_text())["shards"]
    for path in out.glob("*.tar"):
        assert manifest[path.name]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert sum(record["seconds"] for record in manifest.values()) == pytest.approx(20 * 0.05)


def test_audio_is_converted_as_wanted(tmp_path: Path) -> None:
    """A WAV stays as it is unless FLAC is wanted; an AIFF, which training doesn't read, is one anyhow, and so is the sound."""
    stereo = np.stack([tone(0, 1.0), np.zeros(RATE)], axis=1)
    contents = {"a.wav": stereo, "b.aiff": stereo, "ten.wav": np.tile(stereo, 5)}
    for name, samples in contents.items():
        soundfile.write(tmp_path / name, samples, RATE)
    (tmp_path / "list.csv").write_text("path,caption\n" + "".join(f"{name},x\n" for name in contents))
    for options, kinds in {(): ("wav", "flac", "wav"), ("--to_flac",): ("flac",) * 3}.items():
        assert run(tmp_path / "list.csv", tmp_path / f"out{len(options)}", *options) == 0
        items = items_by_source(tmp_path / f"out{len(options)}")
        for (name, samples), kind in zip(contents.items(), kinds, strict=True):
            found, rate = soundfile.read(io.BytesIO(items[name][kind]), always_2d=True)
            expected = samples.mean(axis=1, keepdims=True) if kind == "flac" and samples.shape[1] > 8 else samples
            assert rate == RATE
            np.testing.assert_allclose(found, expected, atol=1e-4)


def test_broken_items_are_listed_and_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "audio"
    folder.mkdir()
    files = {  # name: audio, name and content of a caption file, why it is left out
        "garbage": (b"no audio", "txt", "a sound", "can't be decoded"),
        "one_sample": (wav(np.ones(1)), "txt", "a sound", "a single sample"),
        "no_caption": (wav(tone(1)), "text", "a sound", "no caption file (no_caption.txt or no_caption.json)"),
        "blank": (wav(tone(1)), "txt", "", "empty caption"),
        "list": (wav(tone(1)), "json", "[]", "captions can't be read: expected an object"),
        "cut": (wav(tone(1)), "json", "{", "captions can't be read: Expecting property name"),
        "good": (wav(tone(1)), "txt", "звук колокола", None),
        "8kHz": (wav(tone(1), 8000), "txt", "a sound", None),
        "seven": (wav(np.ones((99, 7))), "json", '{"text": "a sound"}', None),
    }
    for name, (audio, suffix, text, _) in files.items():
        (folder / f"{name}.wav").write_bytes(audio)
        (folder / f"{name}.{suffix}").write_text(text)
    assert run(folder, tmp_path / "out") == 0
    assert "6 items left out" in capsys.readouterr().out
    assert set(items_by_source(tmp_path / "out")) == {"good.wav", "8kHz.wav", "seven.wav"}
    listed = [json.loads(line) for line in (tmp_path / "out" / "broken.jsonl").read_text().splitlines()]
    assert len(listed) == 6
    for item in listed:
        assert files[Path(item["file"]).stem][-1] in item["reason"]


def test_other_contents_and_other_lists_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_list(tmp_path, 3)
    assert run(path, tmp_path / "audio") == 2
    assert "isn't an empty folder" in capsys.readouterr().err
    assert run(path, tmp_path / "out") == 0
    assert run(path, tmp_path / "out") == 0
    assert "1 of 1 shards are there already" in capsys.readouterr().out
    assert run(path, tmp_path / "out", "--to_flac") == 2
    assert "out holds shards of other options, or of files or captions that have changed" in capsys.readouterr().err
    path.write_text(path.read_text().replace("1", "2"))
    assert run(path, tmp_path / "out") == 2
    (tmp_path / "file").touch()
    assert run(path, tmp_path / "file" / "out") == 2
    assert "can't be written: Not a directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--held_out 1", "a share from 0"),
        ("--shard_mb 0", "above 0"),
        ("--shards 2", "--shards 2 is more than the 1 items"),
        ("--split_column split --held_out 0.1", "--split_column says which items are held out"),
        ("--split_column split --group_column kind", "--split_column says which items are held out"),
        ("--group_column kind", "expected --held_out SHARE"),
        ("--stratify_column kind", "expected --held_out SHARE"),
        ("--delimiter ab", "one character, or"),
        ("--kind mel", "--kind mel: --kind waveform and mel, and these alone, take a --preset, one of demo, "),
        ("--preset micro", "--kind encoded: --kind waveform and mel, and these alone, take a --preset"),
        ("--kind waveform --preset micro --to_flac", "expected no --to_flac"),
        ("--train_tokenizer 60000", "from 261 to 50265"),
    ],
)
def test_impossible_options(tmp_path: Path, capsys: pytest.CaptureFixture[str], options: str, message: str) -> None:
    with contextlib.suppress(SystemExit):  # by argparse, whose code is 2
        assert run(write_list(tmp_path, 1), tmp_path / "out", *options.split()) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_verify_finds_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert run(write_list(tmp_path, 6), out, "--shards", 3) == 0
    assert run(out, "--verify") == 0
    shards = sorted(out.glob("*.tar"))
    changed = bytearray(shards[0].read_bytes())
    changed[700] ^= 1
    shards[0].write_bytes(changed)
    shards[1].write_bytes(shards[1].read_bytes()[:-1])
    shards[2].unlink()
    capsys.readouterr()
    assert run(out, "--verify") == 1
    printed = capsys.readouterr().out
    assert all(
        problem in printed for problem in ("0.tar: its content has changed", "1.tar: its content", "is not there")
    )
    assert run(tmp_path / "audio", "--verify") == 2
