"""Redraw the committed pictures whose records or drawing code have changed.

    python docs/pictures/redraw.py        # or: make pictures

`pictures.json` lists each picture with its command, without `--output`, and a digest. The digest is
that of the command, its records, and the script with the modules of `analysis/` that it imports.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("pictures.json")
FORMATS = (".png", ".svg", ".pdf")


def find_drawing_code(script: Path) -> list[Path]:
    """Return a script and the modules of `analysis/` that it imports, directly or not."""
    sources = [script]
    for source in sources:  # grows
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                "clap_ds.analysis"
            ):
                names = [str(node.module).rpartition(".")[2], *(alias.name for alias in node.names)]
                paths = [ROOT / "analysis" / f"{name}.py" for name in names]
                sources += [path for path in paths if path.is_file() and path not in sources]
    return sources


def list_records(argument: str) -> Iterator[Path]:
    """Yield the files of a record: those of a run directory, or a file and the text or JSON next to
    it."""
    path = ROOT / argument
    files = path.glob("*") if path.is_dir() else path.parent.glob(f"{path.stem}.*")
    yield from (file for file in sorted(files) if file.suffix not in FORMATS)


def compute_digest(command: str) -> str:
    """Return the digest of a command's text, drawing code and records."""
    script, *arguments = shlex.split(command)
    files = find_drawing_code(ROOT / script)
    files += [file for argument in arguments for file in list_records(argument)]
    parts = [command.encode(), *(file.read_bytes() for file in sorted(set(files)))]
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def find_stale_pictures() -> dict[str, str]:
    """Return the pictures that have to be redrawn, with their commands."""
    pictures = json.loads(LIST.read_text(encoding="utf-8"))
    return {
        name: picture["command"]
        for name, picture in pictures.items()
        if not (ROOT / name).exists() or picture["digest"] != compute_digest(picture["command"])
    }


def main() -> None:
    pictures = json.loads(LIST.read_text(encoding="utf-8"))
    # Without the date of drawing, equal pictures are equal files.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SOURCE_DATE_EPOCH": "0"}
    for name, command in find_stale_pictures().items():
        shell = [sys.executable, *shlex.split(command), "--output", name]
        subprocess.run(shell, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
        pictures[name]["digest"] = compute_digest(command)
        LIST.write_text(json.dumps(pictures, indent=2) + "\n", encoding="utf-8")
        print(f"drew {name}")


if __name__ == "__main__":
    main()
