"""What `clap.debug` changes, and that it changes nothing when it is off."""

import faulthandler
import os

import pytest

from clap_ds.config.sections import DebugSettings
from clap_ds.ranks import debug


def test_libraries_say_more_and_crashes_leave_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(os.environ)
    enabled: list[bool] = []
    monkeypatch.setattr(faulthandler, "enable", lambda all_threads: enabled.append(all_threads))
    debug.prepare(DebugSettings())
    assert (dict(os.environ), enabled) == (before, [])
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    for name in ("NCCL_DEBUG_SUBSYS", "TORCH_NCCL_DUMP_ON_TIMEOUT"):
        monkeypatch.setenv(name, "")  # to be undone
        monkeypatch.delenv(name)
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", dict(os.environ))
        debug.prepare(DebugSettings(enabled=True, nccl_debug_subsys="NET"))
        found = [os.environ[name] for name in ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "TORCH_NCCL_DUMP_ON_TIMEOUT")]
    assert (found, enabled) == (["WARN", "NET", "1"], [True])
