import json
from argparse import Namespace
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from clap_ds.config.errors import UserError
from clap_ds.data.shard_making.caption_lists import Entry
from clap_ds.data.shard_making.shard_building import plan_shards
from tests.data.builds import items_by_source, run, tone, write_clips
from tests.data.tars import wav

CLASSES = {"dog": 20, "rain": 10, "cat": 4, "bell": 2, "owl": 1}  # items


def items(speakers: int = 1000) -> list[Entry]:
    """Of each class so many, by speakers in turn."""
    kinds = [kind for kind, number in CLASSES.items() for _ in range(number)]
    return [Entry(Path(str(n)), ["x"], {"kind": kind, "speaker": n % speakers}) for n, kind in enumerate(kinds)]


def held_out(entries: list[Entry], share: float = 0.2, seed: int = 0, **columns: str) -> list[Entry]:
    named = dict.fromkeys(("split_column", "group_column", "stratify_column")) | columns
    planned = plan_shards(entries, Namespace(held_out=share, seed=seed, shards=None, shard_mb=1, **named))
    sides = {
        side: [e for shard in planned if shard.name.startswith(side) for _, e in shard.items]
        for side in ("train", "held")
    }
    assert sorted(int(str(e.path)) for side in sides.values() for e in side) == list(range(len(entries)))
    assert sides["train"]
    return sides["held"]


def kinds(entries: list[Entry]) -> Counter[str]:
    return Counter(
        kind for e in entries for kind in (e.more["kind"] if isinstance(e.more["kind"], list) else [e.more["kind"]])
    )


@pytest.mark.parametrize("seed", range(5))
def test_each_class_gives_its_share(seed: int) -> None:
    found = held_out(items(), seed=seed, stratify_column="kind")
    assert kinds(found) == {"dog": 4, "rain": 2, "cat": 1, "bell": 1}
    assert found == held_out(items(), seed=seed, stratify_column="kind")
    assert found != held_out(items(), seed=seed + 5, stratify_column="kind")


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("columns", [{}, {"stratify_column": "kind"}])
def test_groups_are_never_divided(seed: int, columns: dict[str, str]) -> None:
    entries = items(speakers=7)
    found = held_out(entries, seed=seed, group_column="speaker", **columns)
    speakers = {e.more["speaker"] for e in found}
    assert {e.more["speaker"] for e in entries if e not in found}.isdisjoint(speakers)
    assert 4 <= len(found) <= 12
    if columns:
        assert kinds(found).keys() == {"dog", "rain", "cat", "bell"} - (
            {"bell"} if entries_of_one(entries, "bell") else set()
        )


def entries_of_one(entries: list[Entry], kind: str) -> bool:
    return len({e.more["speaker"] for e in entries if e.more["kind"] == kind}) == 1


def test_sounds_of_several_groups_bind_them(tmp_path: Path) -> None:
    """Each item of speakers n and n + 1: none can be told from the others."""
    entries = items()
    for n, entry in enumerate(entries):
        entry.more["speaker"] = [n // 3, n // 3 + (n % 3 == 0 and n < 15)]
    found = {int(str(e.path)) for e in held_out(entries, 0.3, group_column="speaker")}
    chain = set(range(18))
    assert found
    assert chain <= found or chain.isdisjoint(found)
    assert all((a in found) == (b in found) for a, b in pairwise(range(len(entries))) if a // 3 == b // 3)


def test_several_classes_of_an_item_count_each() -> None:
    entries = items()[:30]
    for entry in entries[:10]:
        entry.more["kind"] = ["dog", "loud"]
    found = kinds(held_out(entries, stratify_column="kind"))
    assert (found["dog"], found["rain"]) == (4, 2)
    assert found["loud"] >= 1


@pytest.mark.parametrize(
    ("number", "columns", "message"),
    [
        (1, {}, "nothing can be held out of 1 item"),
        (9, {"group_column": "speaker"}, "nothing can be held out of 9 item.* of one speaker"),
        (9, {"split_column": "side"}, "--split_column side: found no item for training"),
    ],
)
def test_divisions_that_cannot_be(number: int, columns: dict[str, str], message: str) -> None:
    entries = [Entry(Path(str(n)), ["x"], {"speaker": "s", "side": "test"}) for n in range(number)]
    with pytest.raises(UserError, match=message):
        held_out(entries, **columns)


def write(folder: Path, sides: list[str]) -> Path:
    names = write_clips(folder / "audio", len(sides))
    rows = [f"audio/{name},a tone,{side},{n % 3}\n" for n, (name, side) in enumerate(zip(names, sides, strict=True))]
    (folder / "list.csv").write_text("path,caption,split,kind\n" + "".join(rows))
    return folder / "list.csv"


def test_a_column_says_what_is_held_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In common words; of files that are the same, whatever is held out once."""
    sides = ["train", "Training", "held_out", "valid", "val", "validation", "test", "dev", "train", "train"]
    path = write(tmp_path, sides)
    (tmp_path / "audio" / "clip 09.wav").write_bytes(wav(tone(2), 16000, "PCM_16"))  # of held_out
    assert run(path, tmp_path / "out", "--split_column", "split") == 0
    assert set(items_by_source(tmp_path / "out", "train-*.tar")) == {"clip 00.wav", "clip 01.wav", "clip 08.wav"}
    assert len(items_by_source(tmp_path / "out", "held_out-*.tar")) == 6
    assert "split (train + held out): Training 1 + 0, dev 0 + 1, held_out 0 + 1" in capsys.readouterr().out


def test_rows_that_cannot_be_divided_are_refused_by_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, ["train", "development", "", "test"])
    assert run(path, tmp_path / "out", "--split_column", "split") == 2
    refused = capsys.readouterr().err
    assert "list.csv:3: 'development' in its column 'split', expected train or held_out (also valid, val, " in refused
    assert "list.csv:4: nothing in its column 'split'" in refused
    assert run(path, tmp_path / "out", "--split_column", "split", "--lenient") == 0
    assert "2 malformed rows left out" in capsys.readouterr().out


def test_the_report_counts_what_is_on_each_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, ["a", "b"] * 5)
    (tmp_path / "audio" / "clip 00.wav").write_bytes(b"broken")
    options = ["--held_out", 0.3, "--stratify_column", "kind", "--seed", 1]
    assert run(path, tmp_path / "out", *options) == 0
    sides = [items_by_source(tmp_path / "out", f"{side}-*.tar").values() for side in ("train", "held_out")]
    train, held_out = (Counter(json.loads(item["json"])["kind"] for item in side) for side in sides)
    counts = ", ".join(f"{kind} {train[kind]} + {held_out[kind]}" for kind in "012")
    printed = capsys.readouterr().out
    assert f"kind (train + held out): {counts}\n" in printed
    assert f"train: {train.total()} items in 1 shard(s)" in printed
    assert f"held_out: {held_out.total()} items in 1 shard(s)" in printed
    assert train.total() + held_out.total() == 9
    assert "1 items left out, listed with reasons in" in printed
    names = [f"audio/clip {n:02d}.wav,x,,{n % 2 or n}\n" for n in range(1, 10)]
    path.write_text("path,caption,split,kind\n" + "".join(names))
    assert run(path, tmp_path / "few", *options) == 0
    assert "nothing is held out of 4 of 5: 2, 4, 6, 8" in capsys.readouterr().out
