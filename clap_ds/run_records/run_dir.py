"""The run directory: a run's configuration, progress and results, written while it runs.

It has `config.json`, `environment.json`, `metrics.jsonl` (one line per step), `summary.json` (state
and results, for analysis), `tensorboard/` and `rank0.log`. Lines that can't be written are dropped
with one warning: a full disk never ends a run.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, Unpack, cast

from clap_ds.run_records.cpu_binding import RankPlace, describe_places
from clap_ds.run_records.lock import has_ended
from clap_ds.run_records.schema import VERSION, State, StepLine, Summary
from clap_ds.utils.errors import warn_once
from clap_ds.utils.files import (
    open_without_following,
    parse_json,
    read_json,
    read_lines,
    read_object,
    write_atomically,
    write_object,
)
from clap_ds.utils.redaction import redact, redact_all

if TYPE_CHECKING:
    from clap_ds.config.settings import RunSettings


APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND


class RunDirectory:
    """Files of one run. Rank 0 writes them; other ranks only record failures in `summary.json`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stream = JsonlWriter(path / "metrics.jsonl")

    @classmethod
    def create(cls, root: Path, label: str) -> RunDirectory:
        """Create `<root>/<label>-<UTC time>/`, numbered if it exists. Raises OSError."""
        stem = f"{label}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
        for number in itertools.count():
            path = root / f"{stem}-{number}" if number else root / stem
            with suppress(FileExistsError):
                path.mkdir(parents=True)
                return cls(path)
        raise AssertionError

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        write_object(self.path / name, redact_all(content))

    def update_summary(self, *parts: Summary, **fields: Unpack[Summary]) -> Summary:
        """Merge fields into `summary.json` and return all of it; warn if the disk is full."""
        summary: Summary = {"schema": VERSION, **self.summary()}
        for part in (*parts, fields):
            summary.update(part)
        with warn_on_disk_full(self.path / "summary.json"):
            self.write_json("summary.json", summary)
        return summary

    def summary(self) -> Summary:
        path = self.path / "summary.json"
        return cast(Summary, read_json(path)) if path.exists() else {}

    def finish(self, state: State, error: str | None = None) -> None:
        """Record how the run ended, unless a rank already has: later endings are consequences."""
        if self.summary().get("state") in (None, "running"):
            finished = datetime.now(UTC).isoformat(timespec="seconds")
            self.update_summary(state=state, error=error, finished=finished)

    def append_metrics(self, line: StepLine, /, **more: Any) -> None:
        """Append a line to `metrics.jsonl`; `more` has further fields, such as an evaluation's
        metrics."""
        self._stream.append({**line, **more})

    def close(self) -> None:
        self._stream.close()


def create_run_dir(run: RunSettings, environment: dict[str, Any], places: list[RankPlace]) -> Path:
    """Create a run's directory with its first files, and copy the output to its log. Raises
    ValueError if it can't be written.

    Args:
        environment: rank 0's.
        places: each rank's.
    """
    clap = run.clap
    sizes = run.batch_sizes(len(places))
    ranks_per_host = Counter(place["host"] for place in places)
    devices = sorted({place["device_name"] for place in places})
    job = {"world_size": len(places), "num_nodes": len(ranks_per_host)}
    ranks = {
        "hosts": [*ranks_per_host],
        "gpus_per_node": [*ranks_per_host.values()],
        "device_names": devices,
        "ranks": describe_places(places),
    }
    try:
        record = RunDirectory.create(Path(clap.output.dir).resolve(), run.run_name)
        start_log(record.path / "rank0.log")
        record.write_json("environment.json", environment | job | ranks)
        record.write_json("config.json", run.resolved())
    except OSError as error:
        folder = f"clap.output.dir: {clap.output.dir!r}"
        raise ValueError(f"{folder} can't be written: {error.strerror}") from None
    record.update_summary(
        state="running",
        error=None,
        preset=clap.preset().name,
        num_nodes=len(ranks_per_host),
        world_size=len(places),
        micro_batch_per_gpu=sizes.micro_batch,
        gradient_accumulation_steps=sizes.gradient_accumulation_steps,
        global_batch=sizes.global_batch,
        context_length=clap.context_length,
        text_packing=clap.packs_captions,
        precision=run.precision,
        device_name=" and ".join(devices),
        device_type="cpu" if environment["device_memory_bytes"] is None else "cuda",
    )
    return record.path


def mark_killed(path: Path, summary: dict[str, Any]) -> dict[str, Any]:
    """Return a run's summary with the state `killed` if it is `running` without its process.

    If that isn't known, as on another host, `error` has the time at which the run last wrote a
    file.
    """
    environment = path / "environment.json"
    if summary.get("state") != "running" or not environment.is_file():
        return summary
    process = read_object(environment, allow_nan=True).get("process")
    # Older records have none.
    if not isinstance(process, dict):
        process = {}
    is_killed = has_ended(process)
    if is_killed is False:
        return summary
    # Ranks write stacks/ every few seconds.
    files = [environment, *path.glob("*.jsonl"), *path.glob("stacks/*")]
    last_write = datetime.fromtimestamp(max(file.stat().st_mtime for file in files), UTC)
    error = f"last wrote a file at {last_write.isoformat(timespec='seconds')}"
    if is_killed is None:
        return {**summary, "error": error}
    process_name = f"process {process.get('pid')} on {process.get('host')}"
    cause = f"{process_name} is gone without a report (killed, out of memory?)"
    return {**summary, "state": "killed", "error": f"{cause}; {error}"}


class Tee:
    """A stream that copies its output, except redrawn progress bars, to a log file."""

    def __init__(self, stream: TextIO, log: TextIO) -> None:
        self._stream = stream
        self._log = log

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        if "\r" not in text and "\x1b" not in text:
            # The disk may be full.
            with suppress(OSError):
                self._log.write(redact(text))
        # The terminal may be gone.
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        for stream in (self._log, self._stream):
            with suppress(OSError):
                stream.flush()


def deepspeed_logger() -> logging.Logger:
    # not at the top: analysis reads records without it
    from deepspeed.utils import logger

    return logger


def start_log(path: Path) -> None:
    """Copy standard output, standard error and DeepSpeed's log to a file."""
    log = os.fdopen(open_without_following(path, APPEND), "a", buffering=1)
    command = " ".join(redact_all(sys.argv))
    log.write(f"# {datetime.now(UTC).isoformat(timespec='seconds')} {command}\n")
    sys.stdout = cast(TextIO, Tee(sys.stdout, log))
    sys.stderr = cast(TextIO, Tee(sys.stderr, log))
    logger = deepspeed_logger()
    handler = logging.StreamHandler(log)
    handler.setFormatter(logger.handlers[0].formatter)
    logger.addHandler(handler)


@contextmanager
def quiet_deepspeed() -> Iterator[None]:
    """Hide DeepSpeed's info lines on the terminal during its setup, which resets handlers'
    levels."""

    def is_important(record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return False
        # about DeepSpeed's timers
        return "before it has started" not in record.getMessage()

    terminal = deepspeed_logger().handlers[0]
    terminal.addFilter(is_important)
    try:
        yield
    finally:
        terminal.removeFilter(is_important)


@contextmanager
def warn_on_disk_full(output: object) -> Iterator[None]:
    """Suppress OSError of a full or failing disk, with one warning that names the output."""
    try:
        yield
    except OSError as error:
        warn_once(f"{output} can't be written: {error.strerror or error}; the run continues")


class JsonlWriter:
    """A file of lines, created with the first one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None

    def truncate_after(self, step: int) -> float:
        """Drop incomplete lines and those of later steps, which are trained again. Returns the
        largest `train_s`."""
        valid_lines = []
        train_s = 0.0
        with warn_on_disk_full(self._path), suppress(FileNotFoundError):
            for line in read_lines(self._path):
                # incomplete, or of another kind
                with suppress(ValueError, KeyError):
                    fields = parse_json(line, allow_nan=True)
                    train_s = max(train_s, fields.get("train_s", 0.0))
                    if fields["step"] <= step:
                        valid_lines.append(f"{line.decode()}\n")
            write_atomically(self._path, "".join(valid_lines))
        return train_s

    def append(self, line: Mapping[str, Any]) -> None:
        """Append a line, whole or not at all."""
        with warn_on_disk_full(self._path):
            if self._file is None:
                self._file = FileIO(open_without_following(self._path, APPEND), "ab")
            content = f"{json.dumps(line)}\n".encode()
            size = os.fstat(self._file.fileno()).st_size
            try:
                if self._file.write(content) < len(content):
                    raise OSError(None, "No space left on device")
            except OSError:
                self._file.truncate(size)
                raise

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
