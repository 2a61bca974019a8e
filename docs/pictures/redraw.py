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
    # The list grows by the modules that its members import.
    for source in sources:
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom):
                continue
            package = node.module or ""
            if not package.startswith("clap_ds.analysis"):
                continue
            # A module is what stands before `import`, or one of the names after it.
            names = [package.rpartition(".")[2], *(alias.name for alias in node.names)]
            for name in names:
                path = ROOT / "analysis" / f"{name}.py"
                if path.is_file() and path not in sources:
                    sources.append(path)
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
    files = {*find_drawing_code(ROOT / script)}
    for argument in arguments:
        files.update(list_records(argument))
    digest = hashlib.sha256(hashlib.sha256(command.encode()).digest())
    for file in sorted(files):
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


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
