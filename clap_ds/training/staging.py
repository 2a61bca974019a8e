"""Copy nested state to host memory, to write it while training continues.

Uses torch's stager: GPU tensors go to pinned memory, which later copies reuse, and shared memory is copied once.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class HostCopies:
    """Copies state into the same memory: each copy overwrites the previous one."""

    def __init__(self) -> None:
        self._stager: Any = None

    def of(self, state: Any) -> Any:
        """Return the state with its tensors in host memory."""
        if self._stager is None:
            from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

            is_cuda = torch.cuda.is_available()
            options = {"use_pinned_memory": is_cuda, "use_non_blocking_copy": is_cuda}
            self._stager = DefaultStager(StagingOptions(use_shared_memory=False, use_async_staging=False, **options))
        return self._stager.stage(tree_map_only(Tensor, Tensor.detach, state))
