"""Error files."""

import errno
import os
import signal
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from clap_ds.data.workers import Loader
from clap_ds.distributed import error_file
from clap_ds.distributed.error_file import (
    ALL_RANKS,
    HOST,
    IMPORT,
    KILLED,
    LINK,
    LOST_PEER,
    PROGRAM,
    STOPPED,
    UNREACHABLE,
    find_fault,
    read_errors,
    write_error_file,
)
from clap_ds.engine.engine import NonFiniteError
from clap_ds.utils.errors import CollectiveUserError


def test_cause_replaces_an_error_file_and_a_consequence_does_not(tmp_path, monkeypatch):
    monkeypatch.setattr(error_file.this_rank, "folder", None)
    error_file.set_error_dir(tmp_path, 3, "n2")
    write_error_file(STOPPED, "stopped by SIGTERM", 143)
    write_error_file(LOST_PEER, "closed by peer", 1)
    assert [error.message for error in read_errors(tmp_path)] == ["stopped by SIGTERM"]
    try:
        raise KeyError("caption")
    except KeyError as key_error:
        write_error_file(UNREACHABLE, f"two\nlines: {key_error}\n", 1, hosts=["n7"])
    (error,) = read_errors(tmp_path)
    assert (error.message, error.kind) == ("two; lines: 'caption'", UNREACHABLE)
    assert (error.rank, error.host, error.hosts) == (3, "n2", ["n7"])
    assert "test_error_file.py" in error.stack


class _KillsItsWorker(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        signal.raise_signal(signal.SIGKILL)
        return iter([])


def _worker_error() -> Exception:
    """Return the error that a rank gets if its data worker is killed."""
    data = _KillsItsWorker()
    loader = Loader(data, num_workers=1, section="clap.data", multiprocessing_context="fork")
    with pytest.raises(Exception, match=r".") as raised:
        next(loader)
    loader.close()
    return raised.value


def _os_error(number: int) -> OSError:
    return OSError(number, os.strerror(number), "/data/1.tar")


def _wrapped(cause: Exception) -> Exception:
    error = ValueError("clap.data.shards: can't be read")
    error.__cause__ = cause
    return error


def _cuda_error(code: int, text: str) -> Exception:
    error = torch.AcceleratorError(f"CUDA error: {text}")
    error.error_code = code  # as torch's C++ code sets it
    return error


def _nccl_error(text: str) -> Exception:
    return dist.DistBackendError(
        f"NCCL error in: /pytorch/torch/csrc/NCCLUtils.cpp:77, {text}, NCCL version 2.27.5"
    )


SLOW_DOWN = "An error occurred (SlowDown): reduce your request rate"


@pytest.mark.parametrize(
    ("make_error", "fault"),
    [
        (_worker_error, KILLED),
        # As torch raises a data worker's error again.
        (lambda: OSError(f"Caught OSError in DataLoader worker:\n{_os_error(errno.EIO)}"), HOST),
        (lambda: _os_error(errno.ENOENT), PROGRAM),
        (lambda: _wrapped(_os_error(errno.EIO)), HOST),
        (lambda: OSError(errno.EIO, SLOW_DOWN), PROGRAM),  # s3fs
        (lambda: ValueError("Input/output error, Bus error, NCCL error, CUDA error"), PROGRAM),
        (lambda: _cuda_error(719, "unspecified launch failure"), HOST),
        (lambda: _cuda_error(700, "an illegal memory access was encountered"), PROGRAM),
        (lambda: _nccl_error("unhandled system error"), LINK),
        (lambda: _nccl_error("invalid usage\nncclInvalidUsage: This usually reflects"), PROGRAM),
        (lambda: ModuleNotFoundError("No module named 'deepspeed'"), IMPORT),
        (lambda: NonFiniteError("the loss is NaN"), ALL_RANKS),
        (lambda: CollectiveUserError("rank 3: is locked"), ALL_RANKS),
    ],
)
def test_fault_of_an_error_by_type_code_and_text(make_error, fault):
    assert find_fault(make_error()) == fault
