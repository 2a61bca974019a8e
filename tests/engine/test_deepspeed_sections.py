"""Check errors that are reported before a run's first step."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from clap_ds.config.errors import CollectiveUserError
from clap_ds.config.settings import load_run
from clap_ds.distributed.collectives import raise_on_all_ranks
from clap_ds.distributed.init import Ranks
from clap_ds.engine.factory import check_deepspeed_sections, fetch_from_hub
from clap_ds.weights import hub
from tests.rank_pool import RankPool
from tests.training.reference_steps import settings


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"tensorboard": {"enabled": True, "output": "x"}}, "DeepSpeed rejects the configuration"),
    ],
)
def test_what_one_rank_would_find_while_others_wait_is_told_before(
    write_run: Callable[..., Path], section: dict[str, Any], message: str
) -> None:
    run = load_run(write_run(**section))
    with pytest.raises(ValueError, match=message):
        check_deepspeed_sections(run.deepspeed)


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
