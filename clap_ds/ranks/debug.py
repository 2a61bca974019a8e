"""`clap.debug`: libraries say more, crashes leave a core and a Python stack on the terminal, a collective that takes too long
fails, and no rank is ended for standing still while a debugger holds it. Off, it costs nothing.
"""

from __future__ import annotations

import faulthandler
import os

from clap_ds.config.sections import DebugSettings


def prepare(settings: DebugSettings) -> None:
    """Set what libraries read when they start; call before the process group is made. Variables the user set stay."""
    if not settings.enabled:
        return
    faulthandler.enable(all_threads=True)
    for name, value in {
        "NCCL_DEBUG": settings.nccl_debug,
        "NCCL_DEBUG_SUBSYS": settings.nccl_debug_subsys,
        "TORCH_DISTRIBUTED_DEBUG": "INFO",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_SHOW_CPP_STACKTRACES": "1",
    }.items():
        os.environ.setdefault(name, value)
