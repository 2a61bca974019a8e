"""Where a report's numbers come from, tables of versions, commits and commands."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Sequence

from clap_ds.analysis.series import short_commit
from clap_ds.analysis.table import Run, markdown_table, plain_text
from clap_ds.config.secrets import redacted_words

PACKAGES = ("torch", "deepspeed", "transformers")


def provenance(runs: Sequence[Run]) -> str:
    """A table with a line a run, without empty columns; then each command that is known, once."""
    lines = []
    commands: dict[str, list[str]] = defaultdict(list)
    for run in runs:
        environment = run.environment
        hosts, versions = [str(host) for host in environment.get("hosts") or ()], environment.get("versions") or {}
        known = {
            "run": run.name, "nodes": run.nodes, "GPUs": run.gpus, "samples/s/GPU": run.cell("samples_per_s_per_gpu"),
            "state": run.state, "device": run.device, **{name: versions.get(name) for name in PACKAGES},
            "Python": environment.get("python"), "driver": environment.get("driver"),
            "commit": short_commit(str(environment.get("git_commit") or "")),
            "hosts": f"{hosts[0]} … {hosts[-1]}" if len(hosts) > 2 else ", ".join(hosts),
            "finished": run.finished[:19].replace("T", " "),
        }  # fmt: skip
        lines.append({name: str(value or "") for name, value in known.items()})
        if command := environment.get("command"):
            commands[plain_text(shlex.join(redacted_words(map(str, command))))].append(plain_text(run.name))
    header = [name for name in lines[0] if any(line[name] for line in lines)]
    text = markdown_table(header, [[line[name] for name in header] for line in lines])
    listed = "\n".join(f"- `{command}`: {', '.join(names)}" for command, names in commands.items())
    return f"{text}\n\nCommands:\n\n{listed}" if listed else text
