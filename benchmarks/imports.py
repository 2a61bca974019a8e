"""Command: which files a rank opens before its first step, by package.

    python -m benchmarks.imports clap_ds/bench.py --deepspeed_config FILE [--output FILE.md]

Runs the command as one rank until its first step and ends there. Counted are files that Python opens (its audit event `open`)
and libraries that are mapped, whole, whatever is read of them. Not seen: files that libraries open, and what is looked for in vain.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections import Counter
from pathlib import Path

from benchmarks.common import make_parser, show, table

COLUMNS = "package {package} | files {files} | MB {mb:.1f}"


def package(path: str) -> str:
    """What a file belongs to: a package, Python itself, this project (`clap_ds`) or the system."""
    inside = path.partition("-packages/")[2]
    ours = str(Path(__file__).resolve().parents[1])
    return inside.split("/")[0] if inside else "clap_ds" if path.startswith(ours) else "Python and system"


def rows(paths: set[str]) -> list[dict[str, object]]:
    """Of all packages together, then of each; files that aren't there (any more) left out."""
    files: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for path in {os.path.realpath(path) for path in paths if os.path.isfile(path)}:
        for name in ("all", package(path)):
            files[name] += 1
            sizes[name] += os.path.getsize(path)
    return [{"package": name, "files": count, "mb": sizes[name] / 1e6} for name, count in files.most_common()]


def main() -> None:
    options, command = make_parser("imports", __doc__).parse_known_args()
    opened: set[str] = set()
    sys.addaudithook(
        lambda event, told: opened.add(os.fsdecode(told[0])) if event == "open" and isinstance(told[0], str) else None
    )
    from clap_ds.engine.engine import ClapEngine

    def stop(*_: object) -> None:
        mapped = {line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines()}
        found = rows(
            {path for path in opened | mapped if path.startswith("/") and not path.startswith(("/proc", "/dev"))}
        )
        show(options.output, table(COLUMNS, found), found)
        os._exit(0)

    ClapEngine.step = stop  # type: ignore[method-assign,assignment]
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    main()
