"""Where a report's numbers come from, tables of versions, commits and commands."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Sequence

from clap_ds.analysis.series import short_commit
from clap_ds.analysis.table import Run, markdown_table, plain_text
from clap_ds.config.secrets import redacted_words

PACKAGES = ("torch", "deepspeed", "transformers")
SPANS = {"samples/s/GPU": "samples_per_s_per_gpu", "nodes": "nodes", "GPUs": "gpus"}


def provenance(runs: Sequence[Run]) -> str:
    """A table with a line a run, log or table, without empty columns; then each command that is known, once."""
    by_source, lines = defaultdict(list), []
    commands: dict[str, list[str]] = defaultdict(list)
    for run in runs:
        by_source[run.source].append(run)
    for members in by_source.values():
        first, environment = members[0], members[0].environment
        hosts, versions = [str(host) for host in environment.get("hosts") or ()], environment.get("versions") or {}
        known = {
            "run": first.name, **{name: _span(members, column) for name, column in SPANS.items()},
            "state": ", ".join(dict.fromkeys(run.state for run in members)),
            "device": first.device, **{name: versions.get(name) for name in PACKAGES},
            "Python": environment.get("python"), "driver": environment.get("driver"),
            "commit": short_commit(str(environment.get("git_commit") or "")),
            "hosts": f"{hosts[0]} … {hosts[-1]}" if len(hosts) > 2 else ", ".join(hosts),
            "finished": first.finished[:19].replace("T", " "),
        }  # fmt: skip
        lines.append({name: str(value or "") for name, value in known.items()})
        if command := environment.get("command"):
            commands[plain_text(shlex.join(redacted_words(map(str, command))))].append(plain_text(first.name))
    header = [name for name in lines[0] if any(line[name] for line in lines)]
    text = markdown_table(header, [[line[name] for name in header] for line in lines])
    listed = "\n".join(f"- `{command}`: {', '.join(names)}" for command, names in commands.items())
    return f"{text}\n\nCommands:\n\n{listed}" if listed else text


def _span(runs: Sequence[Run], column: str) -> str:
    """The least and the greatest value that runs have."""
    cells = sorted((run.cell(column) for run in runs if getattr(run, column)), key=float)
    return "–".join(dict.fromkeys((cells[0], cells[-1]))) if cells else ""
