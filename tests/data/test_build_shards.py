"""The build command: from a list to what a run reads, resumed or refused."""

import contextlib
import hashlib
import json
from pathlib import Path

import pytest
import torch

from clap_ds.config.model import ClapConfig
from clap_ds.config.sections import ShardData
from clap_ds.data.sources import build_batches
from tests.data.builds import items_by_source, run, write_list


def test_a_newcomer_can_train_on_the_result(
    tmp_path: Path, micro: ClapConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    """The printed settings load; held-out items are apart; the manifest's counts are those of an epoch."""
    out, path = tmp_path / "out", write_list(tmp_path, 20, "audio/gone.wav,x\n")
    (tmp_path / "audio" / "clip 00.wav").write_bytes(b"broken")
    options = (path, out, "--held_out", 0.25, "--shards", 3, "--train_tokenizer", 300, "--max_left_out")
    assert run(*options, 0.09) == 1
    printed = capsys.readouterr()
    assert f"2 left out, listed with reasons in {out}/broken.jsonl, the first: {path.parent}/audio/gone" in printed.out
    assert printed.err.endswith("error: 9.5% left out, more than --max_left_out 0.09\n")
    assert run(*options, 0.1) == 0
    train, held_out = items_by_source(out, "train-*.tar"), items_by_source(out, "held_out-*.tar")
    assert len({**train, **held_out}) == len(train) + len(held_out) == 19
    assert len(list(out.glob("train-*.tar"))) == 3
    printed = capsys.readouterr().out
    assert (
        "tokenizer of 293 tokens for a model trained from nothing, of preset demo, htsat_base_roberta_base" in printed
    )
    assert f"train: {len(train)} items in 3 shard(s), 0.1 MB, 0.00 h" in printed
    assert f"held_out: {len(held_out)} items in 1 shard(s)" in printed
    settings = json.JSONDecoder().raw_decode(printed.partition('"data": ')[2])[0]
    data = ShardData.model_validate({**settings, "num_workers": 0})
    with build_batches(
        data, model=micro, text_tokens=12, micro_batch=15, rank=0, world_size=1, seed=0, device=torch.device("cpu")
    ) as source:
        next(source)
        assert (source.statistics()["epoch_samples"], source.statistics()["num_broken_items"]) == (len(train), 0)
    manifest = json.loads((out / "manifest.json").read_text())["shards"]
    for path in out.glob("*.tar"):
        assert manifest[path.name]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert sum(record["seconds"] for record in manifest.values()) == pytest.approx(19 * 0.05)


def test_other_contents_and_other_lists_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = write_list(tmp_path, 3), tmp_path / "out"
    assert run(path, out) == 0
    assert run(path, out) == 0
    assert "1 of 1 shards are there already" in capsys.readouterr().out
    (tmp_path / "file").touch()
    other = "holds shards of other options, or of files or captions that have changed"
    for folder, options, message in (
        (tmp_path / "audio", (), "isn't an empty folder"),
        (tmp_path / "file" / "out", (), "can't be written: Not a directory; the same command resumes"),
        (out, ("--kind", "waveform", "--preset", "micro"), other),
        (out, ("--shards", 2), other),
    ):
        assert run(path, folder, *options) == 2
        assert message in capsys.readouterr().err
    path.write_text(path.read_text().replace("a tone", "a sine"))
    assert run(path, out) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--held_out 1.1", "expected a number from 0 to 1,"),
        ("--shard_mb 0", "above 0"),
        ("--split_column split --held_out 0.1", "--split_column, --fold_column and --held_out each say what"),
        ("--group_column kind", "expected --held_out SHARE"),
        ("--held_out_fold 1", "expected --fold_column NAME and --held_out_fold FOLD together"),
        ("--kind mel", "--kind mel: waveform and mel, and these alone, take a --preset, one of demo, "),
        ("--part 4/3", "expected a part and how many there are, from 1/N to N/N, or 0/N, found '4/3'"),
        ("--part 1/3 --join 3", "not allowed with argument"),
        ("--preset micro", "--kind encoded: waveform and mel, and these alone, take a --preset"),
        ("--train_tokenizer 60000", "from 261 to 50265"),
    ],
)
def test_impossible_options(tmp_path: Path, capsys: pytest.CaptureFixture[str], options: str, message: str) -> None:
    with contextlib.suppress(SystemExit):  # by argparse, whose code is 2
        assert run(write_list(tmp_path, 1), tmp_path / "out", *options.split()) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
