"""Check what is recorded and printed for each exception that ends a run."""

import contextlib
import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from clap_ds.distributed import error_file, init
from clap_ds.distributed.init import Ranks
from clap_ds.run import (
    NonFiniteError,
    StopSignal,
    TooLittleMemoryError,
    is_connection_lost,
    is_out_of_memory,
    record_outcome,
)
from clap_ds.run_records.run_dir import RunDirectory
from clap_ds.utils.errors import CollectiveUserError

LOST = "[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:5034"


def test_exhausted_memory_and_a_lost_rank_are_told_from_other_errors() -> None:
    memory = (
        "DefaultCPUAllocator: can't allocate memory",
        "CUBLAS_STATUS_ALLOC_FAILED in `cublasCreate`",
    )
    gone = (
        LOST,
        "[gloo/transport/tcp/pair.cc:1]\nwritev: Broken pipe",
        "[gloo/unbound_buffer.cc:84] Timed out waiting 4000ms for recv operation",
        "NCCL error\nncclRemoteError: A call failed, possibly due to a remote process",
        "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)",
        "NCCL communicator was aborted on rank 1",
    )
    assert all(
        is_out_of_memory(each)
        for each in (torch.OutOfMemoryError("20 MiB"), *map(RuntimeError, memory))
    )
    dropped = torch.distributed.DistNetworkError("Failed to recv, got 0 bytes")
    assert all(is_connection_lost(each) for each in (dropped, *map(RuntimeError, gone)))
    of_a_data_server = ConnectionError("Connection reset by peer")
    for each in (
        of_a_data_server,
        ValueError("the memory of this"),
        RuntimeError("CUDA error: invalid argument"),
    ):
        assert not is_out_of_memory(each)
        assert not is_connection_lost(each)


STOPPED = "stopped by SIGUSR1"
AT = "rank 0: out of memory at 616 on H100, after a peak of 3.0 GB"
GONE = f"rank 0: another rank is gone: its connection to this one was lost ({LOST})"
ENDS: list[tuple[Any, ...]] = [
    (None, None, "completed", None, None, ""),
    (CollectiveUserError("no such field"), None, "failed", "no such field", None, ""),
    (TooLittleMemoryError("needs 9 GB"), None, "out_of_memory", "needs 9 GB", None, ""),
    (
        StopSignal(signal.SIGTERM),
        143,
        "terminated",
        "stopped by SIGTERM",
        error_file.STOPPED,
        "stopped by SIGTERM",
    ),
    (StopSignal(signal.SIGUSR1), 138, "timeout", STOPPED, error_file.STOPPED, STOPPED),
    (
        NonFiniteError("NaN at step 2"),
        1,
        "failed",
        "NaN at step 2",
        error_file.ERROR,
        "error: NaN at step 2",
    ),
    (
        ValueError("no shard"),
        1,
        "failed",
        "rank 0: no shard",
        error_file.ERROR,
        "error: rank 0: no shard",
    ),
    (
        torch.OutOfMemoryError("20 MiB\nmore"),
        1,
        "out_of_memory",
        AT,
        error_file.OUT_OF_MEMORY,
        f"error: {AT}: 20 MiB\nreduce train_micro_batch_size_per_gpu",
    ),
    (RuntimeError(LOST), 1, "failed", f"rank 0: {LOST}", error_file.LOST_PEER, GONE),
    (KeyError("x"), 1, "failed", "rank 0: KeyError: 'x'", error_file.ERROR, "Traceback"),
]
"""Exception, exit code, state, error in the summary, kind in the error file, and printed text."""


@pytest.mark.parametrize(("error", "code", "state", "recorded", "kind", "said"), ENDS)
def test_every_end_is_recorded_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException | None,
    code: int | None,
    state: str,
    recorded: str | None,
    kind: str | None,
    said: str,
) -> None:
    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(init, "leave", leave)
    monkeypatch.setattr("clap_ds.run.dist.barrier", lambda: None)
    monkeypatch.setattr("clap_ds.run.peak_memory_bytes", lambda device: 3 * 10**9)
    error_file.set_error_dir(tmp_path, 0, "node1")
    before = signal.getsignal(signal.SIGTERM)
    record = RunDirectory(tmp_path)
    ended = None
    try:
        with record_outcome(record, Ranks(0, 1, 0, 1), lambda: "616 on H100"):
            if error is not None:
                raise error
    except (SystemExit, CollectiveUserError) as found:
        ended = getattr(found, "code", None)
    assert (ended, signal.getsignal(signal.SIGTERM)) == (code, before)
    record.finish("failed", "a later consequence")
    summary: dict[str, Any] = dict(record.summary())
    assert (summary["state"], summary["error"]) == (state, recorded)
    words = [json.loads(path.read_text()) for path in tmp_path.glob("errors/*.json")]
    assert [(word["kind"], word["code"]) for word in words] == ([(kind, code)] if kind else [])
    assert said in capsys.readouterr().err


def test_signal_whose_exception_a_library_catches_still_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may take any time on its way: blocks that it leaves wait for checkpoints."""
    left: list[int] = []
    monkeypatch.setattr(init, "exit_now", left.append)
    monkeypatch.setattr("clap_ds.run.SWALLOWED_S", 0.1)
    with record_outcome(RunDirectory(tmp_path), Ranks(1, 2, 1, 2), str):
        with contextlib.suppress(BaseException):
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                signal.pause()
                on_its_way = [*left]
        time.sleep(1)
    assert on_its_way == []
    assert 128 + signal.SIGTERM in left


def test_a_signal_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    monkeypatch.setattr(init, "leave", left.append)
    with record_outcome(RunDirectory(tmp_path), Ranks(1, 2, 1, 2), str):
        signal.raise_signal(signal.SIGINT)
    assert left == [128 + signal.SIGINT]
    assert RunDirectory(tmp_path).summary()["state"] == "terminated"  # every rank records it
