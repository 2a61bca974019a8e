"""What is worked out of shards before they are made, against figures worked out by hand, and against shards that were made."""

import io
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from webdataset.writer import TarWriter

from clap_ds import shards
from clap_ds.config.errors import UserError
from clap_ds.config.model import load_preset
from clap_ds.data.shard_manifest import read_manifest
from clap_ds.data.shard_size import Known, amount, clip_bytes, digits, duration, item_bytes, look_into, set_bytes
from tests.data import builds
from tests.data.tars import marked_tars, wav

TINY = load_preset("htsat_tiny_roberta_base").audio


def report(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, list[str]]:
    """The cells of each row of the table, by its label."""
    shards.main(["size", *map(str, words)])
    rows = [re.split(r"  +", line) for line in capsys.readouterr().out.partition("\n\n")[0].splitlines()]
    return {label: cells for label, *cells in rows}


def test_thousand_waveforms(capsys: pytest.CaptureFixture[str]) -> None:
    """A WAV of 44 + 960,000 bytes is 1,876 blocks; with two headers and a block of JSON, 962,048 bytes. 960 MB are two
    tars of 500 items; each, with its end, fills 46,976 records of 10,240 bytes: 962,068,480."""
    words = ["--clips", 1000, "--kind", "waveform", "--link", 10, "--disk_mb_per_s", 50]
    assert report(capsys, *words, "--rate", 1000, "--gpus", 6, "--gpus_per_node", 4) == {
        "1,000 clips of 10 s": ["waveform"],
        "a clip, in its tar": ["962,068 B"],
        "all": ["962 MB"],
        "tars of about 500 MB": ["2"],
        "inodes (2,000 as single files)": ["9"],
        "copied at 10 Gbit/s in": ["0.77 s"],
        "written at 50 MB/s in": ["19.2 s"],
        "at 1,000 samples/s a GPU": ["6,000 items/s"],
        "at 1,000 samples/s a GPU, bytes": ["5.77 GB/s"],
        "at 1,000 samples/s a GPU, to a node": ["3.85 GB/s"],
    }


def test_features_and_clips_that_do_not_divide() -> None:
    """1,001 frames × 64 bins in 2 bytes, after a header of 128, are 251 blocks, with the rest 254 of an item: 130,048 bytes.
    7 clips in 3 tars: 3, 2 and 2 of them."""
    assert clip_bytes("mel", TINY, 10) == clip_bytes("mel", TINY, 3) == 128_256
    assert clip_bytes("mel", TINY, 20) == 128 + 2 * 2001 * 64
    assert clip_bytes("encoded", TINY, 2.5, "mp3") == 40_000
    assert item_bytes(128_256) == 130_048
    assert set_bytes(7, 3, 10_240) == 4 * 10_240 + 2 * 3 * 10_240


def test_tars_and_files_are_as_large_as_said() -> None:
    for clip, items in ((44, 1), (512, 7), (513, 2), (960_044, 7)):
        file = io.BytesIO()
        with TarWriter(file, encoder=False, mtime=0) as tar:
            for number in range(items):
                tar.write({"__key__": f"{number:09d}", "wav": bytes(clip), "json": b'{"caption": "a tone"}'})
        assert set_bytes(items, 1, item_bytes(clip)) == len(file.getvalue())
    np.save(features := io.BytesIO(), np.zeros((1501, 64), np.float16))
    assert clip_bytes("mel", TINY, 15) == len(features.getvalue())
    assert clip_bytes("waveform", TINY, 0.5) == len(wav(np.zeros(24_000), 48_000, "PCM_16"))


def test_a_build_has_the_sizes_and_inodes_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert builds.run(builds.write_list(tmp_path, 6), out, "--shards", 3) == 0
    built = [out, *out.rglob("*")]
    capsys.readouterr()
    words = ["--like", f"{out}/*.tar", "--kind", "encoded", "waveform", "--preset", "micro"]
    found = report(capsys, *words, "--shard_mb", max(path.stat().st_size for path in out.glob("*.tar")) / 1e6)
    size = sum(record.bytes for record in read_manifest(str(out)).shards.values())
    assert found["6 clips of 0.05 s"] == ["encoded", "waveform"]
    assert found["all"] == [amount(size), amount(set_bytes(6, 4, item_bytes(44 + 2 * 2400)))]
    assert [cells[0] for label, cells in found.items() if label.startswith(("tars", "inodes"))] == [
        "3",
        f"{len(built)}",
    ]


def test_tars_without_a_manifest_are_counted(tmp_path: Path) -> None:
    marked_tars(tmp_path, 2, 5)
    tars = [str(path) for path in tmp_path.glob("*.tar")]
    assert look_into(tars) == Known(10, sum(Path(tar).stat().st_size for tar in tars), None, "encoded")
    with pytest.raises(UserError, match=r"memory://none/a\.tar or others: how many items"):
        look_into(["memory://none/a.tar"])


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers have three digits or more, and the largest no exponent; without torch."""
    found = report(capsys, "--clips", 10**6, "--gpus", 16, "--rate", 3300)
    assert found["at 3,300 samples/s a GPU, to a node"] == ["14 GB/s", "12.7 GB/s", "1.72 GB/s"]
    shards.main(f"size --clips {10**15} --seconds 40000 --link 0.001 --gpus {10**7} --shard_mb 0.001".split())
    assert not any("e+" in word or "inf" in word for word in capsys.readouterr().out.split())
    assert [digits(value) for value in (0, 0.00123456, 1.5, 100, 12345.6)] == ["0", "0.00123", "1.5", "100", "12,346"]
    assert [amount(value) for value in (0, 999, 1000, 1.5e9, 2e16)] == ["0 B", "999 B", "1 kB", "1.5 GB", "20,000 TB"]
    assert [duration(seconds) for seconds in (90, 600, 9000, 864_000)] == ["90 s", "10 min", "2.5 h", "10 days"]
    script = "import sys; from clap_ds import shards; shards.main(['size', '--clips', '7']); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], stdout=subprocess.DEVNULL, check=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--clips 0", "--clips: expected a whole number from 1"),
        ("--clips 5 --link=-3", "--link: expected a number from 0.001 to 1,000,000,000, found '-3'"),
        ("--clips 5 --kind mell", "invalid choice: 'mell'"),
        ("", "--clips: expected how many"),
        ("--like nowhere-*.tar", "--like: clap.data.shards: no file matches 'nowhere-"),
    ],
)
def test_what_cannot_be(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((SystemExit, UserError)) as error:
        shards.main(["size", *words.split()])
    assert message in capsys.readouterr().err + str(error.value)
