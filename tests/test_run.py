"""What is recorded and printed for each exception that ends a run."""

import contextlib
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from clap_ds.distributed import error_file, init
from clap_ds.distributed.error_file import ERROR, LOST_PEER, OUT_OF_MEMORY, STOPPED
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

CPU = torch.device("cpu")
LOST = "[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:5034"
MEMORY_ERRORS: list[Exception] = [
    torch.OutOfMemoryError("20 MiB"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    RuntimeError("CUBLAS_STATUS_ALLOC_FAILED in `cublasCreate`"),
]
CONNECTION_ERRORS: list[Exception] = [
    torch.distributed.DistNetworkError("Failed to recv, got 0 bytes"),
    RuntimeError(LOST),
    RuntimeError("[gloo/unbound_buffer.cc:84] Timed out waiting 4000ms for recv operation"),
    RuntimeError("NCCL error\nncclRemoteError: A call failed, possibly due to a remote process"),
    RuntimeError("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)"),
]
OTHER_ERRORS: list[Exception] = [
    # Of a data server.
    ConnectionError("Connection reset by peer"),
    ValueError("the memory of this"),
    RuntimeError("CUDA error: invalid argument"),
]


@pytest.mark.parametrize("error", MEMORY_ERRORS + CONNECTION_ERRORS + OTHER_ERRORS, ids=str)
def test_memory_errors_and_lost_connections_are_recognized(error):
    assert is_out_of_memory(error) == (error in MEMORY_ERRORS)
    assert is_connection_lost(error) == (error in CONNECTION_ERRORS)


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Exit codes with which the process would have ended."""
    codes: list[int] = []
    monkeypatch.setattr(init, "leave", codes.append)
    monkeypatch.setattr(init, "exit_now", codes.append)
    monkeypatch.setattr("clap_ds.run.dist.barrier", lambda: None)
    return codes


def _end(folder: Path, error: BaseException, rank: int = 0) -> Any:
    """End a run of two ranks, and return its summary's state and error."""
    error_file.set_error_dir(folder, rank, f"node{rank}")
    record = RunDirectory(folder)
    with record_outcome(record, Ranks(rank, 2, rank, 2), CPU):
        raise error
    # A later consequence doesn't replace the first end.
    record.finish("failed", "a later consequence")
    summary = record.summary()
    return summary.get("state"), summary.get("error")


@pytest.mark.parametrize(
    ("error", "code", "kind", "state", "recorded", "printed"),
    [
        (StopSignal(signal.SIGUSR1), 138, STOPPED, "timeout", "stopped by SIGUSR1", "stopped by"),
        # Raised on all ranks, so no rank is named.
        (NonFiniteError("NaN at step 2"), 1, ERROR, "failed", "NaN at step 2", "error: NaN"),
        (ValueError("no shard"), 1, ERROR, "failed", "rank 0: no shard", "error: rank 0: no shard"),
        (KeyError("x"), 1, ERROR, "failed", "rank 0: KeyError: 'x'", "Traceback"),
        (RuntimeError(LOST), 1, LOST_PEER, "failed", f"rank 0: {LOST}", "another rank is gone"),
        (
            torch.OutOfMemoryError("20 MiB\nmore"),
            1,
            OUT_OF_MEMORY,
            "out_of_memory",
            "rank 0: out of memory at micro-batch 616 on H100, after a peak of 3.0 GB",
            "3.0 GB: 20 MiB\nreduce train_micro_batch_size_per_gpu",
        ),
    ],
)
def test_failed_run_is_recorded_printed_and_left(
    tmp_path, monkeypatch, left, capsys, error, code, kind, state, recorded, printed
):
    monkeypatch.setattr("clap_ds.run.peak_memory_bytes", lambda device: 3 * 10**9)
    monkeypatch.setattr("clap_ds.run.environment.device_name", lambda device: "H100")
    RunDirectory(tmp_path).update_summary(micro_batch_per_gpu=616)
    handler = signal.getsignal(signal.SIGTERM)
    assert _end(tmp_path, error) == (state, recorded)
    assert signal.getsignal(signal.SIGTERM) == handler
    assert left == [code]
    (written,) = error_file.read_errors(tmp_path)
    assert (written.kind, written.code) == (kind, code)
    assert printed in capsys.readouterr().err


def test_error_of_all_ranks_is_printed_by_rank_0_only(tmp_path, left, capsys):
    _end(tmp_path, NonFiniteError("NaN at step 2"), rank=1)
    assert left == [1]
    assert capsys.readouterr().err == ""


def test_user_error_is_recorded_and_raised(tmp_path, left):
    with pytest.raises(TooLittleMemoryError):
        _end(tmp_path, TooLittleMemoryError("needs 9 GB"))
    summary = RunDirectory(tmp_path).summary()
    assert (summary["state"], summary["error"]) == ("out_of_memory", "needs 9 GB")
    assert left == []


def test_signal_that_a_library_catches_ends_the_run_but_not_while_its_blocks_are_left(
    tmp_path, monkeypatch, left
):
    """Blocks that the exception leaves may wait for checkpoints."""
    monkeypatch.setattr("clap_ds.run.SWALLOWED_S", 0.1)
    with record_outcome(RunDirectory(tmp_path), Ranks(1, 2, 1, 2), CPU):
        with contextlib.suppress(BaseException):
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                signal.pause()
                left_meanwhile = [*left]
        deadline = time.monotonic() + 60
        while not left and time.monotonic() < deadline:
            time.sleep(0.01)
    assert left_meanwhile == []
    assert left[0] == 128 + signal.SIGTERM
    # By every rank.
    assert RunDirectory(tmp_path).summary()["state"] == "terminated"
