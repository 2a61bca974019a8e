"""Create clips and lists, and run the shard commands, for tests."""

import json
from pathlib import Path

import numpy as np

from clap_ds import shards
from clap_ds.utils.errors import exit_code_of
from tests.data.tars import items_in, wav

RATE = 16000


def tone(number: int, seconds: float = 0.05) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * (200 + 10 * number) * np.arange(round(seconds * RATE)) / RATE)


def write_list(folder: Path, number: int, more: str = "") -> Path:
    """Write `number` clips and a CSV that lists them, followed by `more` rows."""
    (folder / "audio").mkdir()
    names = [f"clip {n:02d}.wav" for n in range(number)]
    for n, name in enumerate(names):
        (folder / "audio" / name).write_bytes(wav(tone(n), RATE, "PCM_16"))
    path = folder / "list.csv"
    path.write_text(
        "path,caption\n" + "".join(f"audio/{name},a tone {name}\n" for name in names) + more
    )
    return path


def run(*arguments: object) -> int:
    words = ["build", "--workers", "1", "--max_left_out", "1", *map(str, arguments)]
    return exit_code_of(lambda: shards.main(words))


def reasons_in(folder: Path) -> dict[str, str]:
    """Return file name → reason for skipped items."""
    listed = map(json.loads, (folder / "broken.jsonl").read_text().splitlines())
    return {Path(item["file"]).name: item["reason"] for item in listed}


def items_by_source(folder: Path, pattern: str = "*.tar") -> dict[str, dict[str, bytes]]:
    """Return members of all tars by source file name."""
    items = list(items_in(folder, pattern).values())
    by_source = {json.loads(item["json"])["source"]: item for item in items}
    assert len(by_source) == len(items)
    return by_source
