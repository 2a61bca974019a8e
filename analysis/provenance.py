"""Where a report's numbers come from, tables of versions, commits and commands."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from clap_ds.analysis.series import short_commit
from clap_ds.analysis.table import Run, markdown_table

PACKAGES = ("torch", "deepspeed", "transformers")


def provenance(runs: Sequence[Run]) -> str:
    """A table with a line a run, log or table, without empty columns; then each command that is known, once."""
    by_source: dict[str, list[Run]] = {}
    for run in runs:
        by_source.setdefault(run.source, []).append(run)
    lines: dict[str, dict[str, str]] = {}
    commands: dict[str, list[str]] = {}
    for source, members in by_source.items():
        first, environment = members[0], members[0].environment
        hosts = [str(host) for host in environment.get("hosts") or ()]
        versions = environment.get("versions") or {}
        nodes, gpus = [run.nodes for run in members], [run.gpus for run in members]
        rates = sorted((run.cell("samples_per_s_per_gpu") for run in members if run.rate), key=float)
        known = {
            "samples/s/GPU": "–".join(dict.fromkeys((rates[0], rates[-1]))) if rates else "",
            "state": ", ".join(dict.fromkeys(run.state for run in members)),
            "nodes": "–".join(map(str, dict.fromkeys((min(nodes), max(nodes))))),
            "GPUs": "–".join(map(str, dict.fromkeys((min(gpus), max(gpus))))),
            "device": first.device, **{name: versions.get(name) for name in PACKAGES},
            "Python": environment.get("python"), "driver": environment.get("driver"),
            "commit": short_commit(str(environment.get("git_commit") or "")),
            "hosts": f"{hosts[0]} … {hosts[-1]}" if len(hosts) > 2 else ", ".join(hosts),
            "finished": first.finished[:19].replace("T", " "),
        }  # fmt: skip
        lines[source] = {"run": first.name, **{name: str(value or "") for name, value in known.items()}}
        if command := environment.get("command"):
            commands.setdefault(shlex.join(map(str, command)), []).append(first.name)
    header = [name for name in lines[runs[0].source] if any(line[name] for line in lines.values())]
    text = markdown_table(header, [[line[name] for name in header] for line in lines.values()])
    listed = "\n".join(f"- `{command}`: {', '.join(names)}" for command, names in commands.items())
    return f"{text}\n\nCommands:\n\n{listed}" if listed else text
