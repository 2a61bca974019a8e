"""Command: which files a rank opens before its first step, by package.

    python -m benchmarks.imports clap_ds/bench.py --deepspeed_config FILE --output FILE.md

Runs the command as one rank and ends it at its first step. Counted, at their whole size, are files that Python opens (its audit
event `open`) and that are mapped, as libraries are; not files that libraries open, nor what is looked for in vain.
"""

import os
import runpy
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.common import make_parser, show, table


def by_package(paths: Iterable[str]) -> list[dict[str, Any]]:
    """Number and MB of the files that there are, all and by the folder in `site-packages` they lie in (`""`: in none)."""
    files, sizes = Counter[str](), Counter[str]()
    for path in {os.path.realpath(path) for path in paths if os.path.isfile(path)}:
        for name in ("all", path.partition("/site-packages/")[2].split("/")[0]):
            files[name] += 1
            sizes[name] += os.path.getsize(path)
    return [{"package": name, "files": count, "mb": sizes[name] / 1e6} for name, count in files.most_common()]


if __name__ == "__main__":
    options, sys.argv = make_parser("imports", __doc__).parse_known_args()
    opened: set[str] = set()
    sys.addaudithook(lambda event, told: opened.add(str(told[0])) if event == "open" else None)
    from clap_ds.engine.engine import ClapEngine

    def stop(*_: Any) -> None:
        maps = Path("/proc/self/maps").read_text().splitlines()
        found = by_package(opened | {line.split(maxsplit=5)[-1] for line in maps})
        show(options.output, table("package {package} | files {files} | MB {mb:.1f}", found), found)
        os._exit(0)

    ClapEngine.step = stop  # type: ignore[assignment, method-assign]
    runpy.run_path(sys.argv[0], run_name="__main__")
