"""Check gradients that are sent with NCCL, which requires two GPUs."""

import pytest

from tests.engine.test_engine import GPU_ROUNDINGS, PRECISIONS, _difference
from tests.rank_pool import RankPool

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("sync", ["overlap", "deepspeed"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_ten_steps_agree_with_plain_ddp_over_nccl(two_gpus: RankPool, precision: str, sync: str) -> None:
    assert all(difference <= GPU_ROUNDINGS for difference in two_gpus.run(_difference, precision, 2, sync))
