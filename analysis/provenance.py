"""Where a report's numbers come from, and what it lacks: tables of versions, commits and commands, and doubts in words."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from clap_ds.analysis.table import Row, Run, by_series, count_of, markdown_table

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
        known = {
            "state": ", ".join(dict.fromkeys(run.state for run in members)),
            "nodes": "–".join(map(str, dict.fromkeys((min(nodes), max(nodes))))),
            "GPUs": "–".join(map(str, dict.fromkeys((min(gpus), max(gpus))))),
            "device": first.device, **{name: versions.get(name) for name in PACKAGES},
            "Python": environment.get("python"), "driver": environment.get("driver"), "commit": _short(_commit(first)),
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


def _short(commit: str) -> str:
    """The beginning of a commit, with the + of files that differ from it."""
    return commit[:12] + "+" * (len(commit) > 12 and commit.endswith("+"))


def _commit(run: Run) -> str:
    return str(run.environment.get("git_commit") or "")


def gaps(rows: Sequence[Row], runs: Sequence[Run]) -> Iterator[str]:
    """What a reader would look for and not find, and what should make them doubt."""
    for members in by_series(rows):
        title = members[0].title
        measured = [row for row in members if row.rate]
        if len({row.gpus for row in measured}) < 2:
            yield f"{title}: {count_of(len(measured), 'scale')} with a rate, so no scaling efficiency"
        if without := _gpus(row for row in measured if row.samples_per_s_per_gpu_2sigma is None):
            yield f"{title}: no spread known at {without} GPUs"
        if single := _gpus(row for row in measured if row.repeats == 1 and row.state != "published"):
            yield f"{title}: one run only at {single} GPUs, so its spread over repeats is not known"
        if measured and not any(row.mfu_percent or row.mfu_model_percent for row in measured):
            yield f"{title}: no MFU; the device's peak or the model's FLOPs are not known"
        if unbroken := _gpus(row for row in measured if not row.breakdown_s):
            yield f"{title}: no breakdown of the step at {unbroken} GPUs"
    for run in runs:
        if run.state not in ("completed", "published"):
            reason = f": {' '.join(run.error.split())[:160]}" if run.error else ""
            yield f"{run.name}: state {run.state}{reason}"
    if without := _some(run for run in runs if run.kind != "record"):
        yield f"no record of versions, commit or command: {without}"
    if uncommitted := _some(run for run in runs if run.kind == "record" and not _commit(run)):
        yield f"git commit not recorded: {uncommitted}"
    versions = [
        str([known.get(name) for name in PACKAGES]) for run in runs if (known := run.environment.get("versions"))
    ]
    for what, found in (("commit", map(_commit, runs)), ("versions", versions)):
        if len(set(filter(None, found))) > 1:
            yield f"runs differ in {what}: compare them with care"


def _gpus(rows: Iterator[Row]) -> str:
    return ", ".join(str(row.gpus) for row in rows)


def _some(runs: Iterator[Run]) -> str:
    names = list(dict.fromkeys(run.name for run in runs))
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
