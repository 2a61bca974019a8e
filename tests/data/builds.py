"""Create clips and lists, and run the shard commands, for tests."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from clap_ds import shards
from clap_ds.utils.errors import exit_code_of
from tests.data.tars import items_in, wav

RATE = 16000


def tone(number: int, seconds: float = 0.05) -> np.ndarray:
    """Return a tone whose pitch depends on a number."""
    time = np.arange(round(seconds * RATE)) / RATE
    return 0.5 * np.sin(2 * np.pi * (200 + 10 * number) * time)


def write_list(folder: Path, num_clips: int, rows: str = "") -> Path:
    """Write clips and a CSV that lists them, followed by more `rows`."""
    (folder / "audio").mkdir()
    lines = ["path,caption\n"]
    for number in range(num_clips):
        name = f"clip {number:02d}.wav"
        (folder / "audio" / name).write_bytes(wav(tone(number), RATE, "PCM_16"))
        lines.append(f"audio/{name},a tone {name}\n")
    path = folder / "list.csv"
    path.write_text("".join(lines) + rows)
    return path


def run(*arguments: object) -> int:
    command = ["build", "--workers", "1", "--max_left_out", "1", *map(str, arguments)]
    return exit_code_of(lambda: shards.main(command))


def reasons_in(folder: Path) -> dict[str, str]:
    """Return file name → reason for skipped items."""
    lines = map(json.loads, (folder / "broken.jsonl").read_text().splitlines())
    return {Path(line["file"]).name: line["reason"] for line in lines}


def items_by_source(folder: Path, pattern: str = "*.tar") -> dict[str, dict[str, bytes]]:
    """Return members of all tars by source file name."""
    items = list(items_in(folder, pattern).values())
    by_source = {json.loads(item["json"])["source"]: item for item in items}
    assert len(by_source) == len(items)
    return by_source


def fields_in(folder: Path, pattern: str = "*.tar") -> dict[str, dict[str, Any]]:
    """Return the json of all items by source file name."""
    items = items_by_source(folder, pattern)
    return {name: json.loads(item["json"]) for name, item in items.items()}
