from pathlib import Path

from clap_ds.config.sections import ShardData
from clap_ds.data.shard_manifest import Manifest, ShardRecord, epoch_samples, write_manifest
from tests.data.tars import marked_item, marked_tars, put, write_tar


def test_epoch_samples(tmp_path: Path) -> None:
    """By the manifest where there is one, else by the items of local tars that have audio and what a caption can be in."""
    pattern = marked_tars(tmp_path, 2, 5)
    partial = [("x.wav", b"no caption"), ("y.txt", b"no audio"), ("z.jpg", b""), ("e.FLAC", b""), ("e.json", b"")]
    write_tar(tmp_path / "002.tar", [*marked_item(1), *partial])
    data = ShardData(source="shards", shards={pattern: 2.0, str(tmp_path / "002.tar"): 1.0}, tokenizer="x")
    assert epoch_samples(data) == 12
    write_manifest(tmp_path, Manifest({"000.tar": ShardRecord(items=700, bytes=0, seconds=0.0, sha256="")}))
    assert epoch_samples(data) == 707
    url = put("memory://unknown/a.tar", (tmp_path / "000.tar").read_bytes())
    remote = ShardData(source="shards", shards=url, tokenizer="x")
    assert epoch_samples(remote) is None
    put("memory://unknown/manifest.json", (tmp_path / "manifest.json").read_bytes().replace(b"000.tar", b"a.tar"))
    assert epoch_samples(remote) == 700
