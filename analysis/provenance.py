"""Where a report's numbers come from: versions, commit, hosts and command of every run, and what is not known of them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clap_ds.analysis.runs import Run
from clap_ds.analysis.table import markdown_table

PACKAGES = ("torch", "deepspeed", "transformers")


@dataclass(frozen=True)
class Provenance:
    """One input of a report; what its record doesn't say is empty."""

    run: Run
    versions: tuple[tuple[str, str], ...] = ()
    python: str = ""
    driver: str = ""
    commit: str = ""
    hosts: tuple[str, ...] = ()
    command: str = ""
    finished: str = ""

    @property
    def name(self) -> str:
        return Path(self.run.source).name


def read_provenance(run: Run) -> Provenance:
    """What the run directory's `environment.json` and `summary.json` say; logs and tables say nothing of it."""
    if run.kind != "record":
        return Provenance(run)
    environment = _load(Path(run.source) / "environment.json")
    summary = _load(Path(run.source) / "summary.json")
    versions = environment.get("versions")
    command, hosts = environment.get("command"), environment.get("hosts")
    versions = versions if isinstance(versions, dict) else {}
    return Provenance(
        run,
        tuple((name, str(versions[name])) for name in PACKAGES if versions.get(name)),
        str(environment.get("python") or ""),
        str(environment.get("driver") or ""),
        str(environment.get("git_commit") or ""),
        tuple(map(str, hosts)) if isinstance(hosts, list) else (),
        shlex.join(map(str, command)) if isinstance(command, list) else "",
        str(summary.get("finished") or ""),
    )


def render_provenance(found: Sequence[Provenance]) -> str:
    """A table with a line a run, log or table, without empty columns; then each command that is known, once."""
    header = ("run", "state", "nodes", "GPUs", "device", *PACKAGES, "Python", "driver", "commit", "hosts", "finished")
    by_source: dict[str, list[Provenance]] = {}
    for item in found:
        by_source.setdefault(item.run.source, []).append(item)
    columns = list(zip(header, *map(_cells, by_source.values()), strict=True))
    columns = [column for column in columns if any(column[1:])]
    header, *rows = zip(*columns, strict=True)
    text = markdown_table(header, rows) + "\n"
    by_command: dict[str, list[str]] = {}
    for item in found:
        if item.command:
            by_command.setdefault(item.command, []).append(item.name)
    if by_command:
        lines = [f"- `{command}`: {', '.join(names)}" for command, names in by_command.items()]
        text += "\nCommands:\n\n" + "\n".join(lines) + "\n"
    return text


def _cells(items: Sequence[Provenance]) -> list[str]:
    """A line for one source: a run, or the several that a log or table holds."""
    first, versions = items[0], dict(items[0].versions)
    hosts = f"{first.hosts[0]} … {first.hosts[-1]}" if len(first.hosts) > 2 else ", ".join(first.hosts)
    states = ", ".join(dict.fromkeys(item.run.state for item in items))
    nodes, gpus = ({item.run.num_nodes or 0 for item in items}, {item.run.num_gpus or 0 for item in items})
    return [
        first.name, states, _range(nodes), _range(gpus), first.run.device_name or "",
        *(versions.get(name, "") for name in PACKAGES), first.python, first.driver, first.commit[:12], hosts,
        first.finished[:19].replace("T", " "),
    ]  # fmt: skip


def _range(counts: set[int]) -> str:
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low}–{high}"


def provenance_gaps(found: Sequence[Provenance]) -> list[str]:
    """What can't be traced, in words."""
    gaps = []
    without = [item.name for item in found if item.run.kind != "record"]
    if without:
        gaps.append(f"no record of versions, commit or command: {_some(without)}")
    uncommitted = [item.name for item in found if item.run.kind == "record" and not item.commit]
    if uncommitted:
        gaps.append(f"git commit not recorded: {_some(uncommitted)}")
    for what in ("commit", "versions"):
        if len({getattr(item, what) for item in found if getattr(item, what)}) > 1:
            gaps.append(f"runs differ in {what}: compare them with care")
    return gaps


def _some(names: Sequence[str]) -> str:
    unique = list(dict.fromkeys(names))
    return ", ".join(unique[:5]) + (f" and {len(unique) - 5} more" if len(unique) > 5 else "")


def _load(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, OSError):
        return {}
    return value if isinstance(value, dict) else {}
