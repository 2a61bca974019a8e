"""Check errors that are reported before a run's first step."""

from unittest import mock

import pytest
import torch.distributed as dist

from clap_ds.config.errors import CollectiveUserError
from clap_ds.distributed.collectives import raise_on_all_ranks
from clap_ds.distributed.init import Ranks
from clap_ds.engine.factory import fetch_from_hub
from clap_ds.weights import hub
from tests.rank_pool import RankPool
from tests.training.reference_steps import settings


def _refusal() -> tuple[str, int]:
    """Return the message, and how often this rank looked."""
    ranks = Ranks(dist.get_rank(), 2, dist.get_rank(), 2)
    run = settings(model={"preset": "htsat_tiny_roberta_base", "pretrained_text": True})
    with mock.patch.object(hub, "load_by_name", side_effect=ValueError("not on the hub")) as load:
        with pytest.raises(CollectiveUserError) as refused, raise_on_all_ranks():
            fetch_from_hub(run.clap.model, run.clap.data, ranks)
        return str(refused.value), load.call_count


def test_one_rank_looks_for_weights_and_all_stop(two_ranks: RankPool) -> None:
    assert two_ranks.run(_refusal) == [("not on the hub", 1), ("not on the hub", 0)]
