"""What comes from a hub is looked for before any work, by one rank."""

import socket
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from clap_ds.config.errors import AgreedError
from clap_ds.engine.hub_files import fetch
from clap_ds.model import text
from clap_ds.ranks.agreement import together
from clap_ds.ranks.distributed import Ranks
from tests.rank_pool import RankPool
from tests.training import training_commands as commands
from tests.training.reference_steps import settings


def _refusal() -> tuple[str, int]:
    """The message, and how often this rank looked."""
    ranks = Ranks(dist.get_rank(), 2, dist.get_rank(), 2)
    run = settings(model={"preset": "htsat_tiny_roberta_base", "text_from_hub": True})
    with mock.patch.object(text, "load_by_name", side_effect=ValueError("not on the hub")) as load:
        with pytest.raises(AgreedError) as refused:
            together(lambda: fetch(run, ranks))
        return str(refused.value), load.call_count


def test_one_rank_looks_for_weights_and_all_stop(two_ranks: RankPool) -> None:
    assert two_ranks.run(_refusal) == [("not on the hub", 1), ("not on the hub", 0)]


@pytest.mark.end_to_end
def test_a_run_whose_tokenizer_is_on_a_hub_that_never_answers(tmp_path: Path) -> None:
    data = {"source": "shards", "shards": "none.tar", "tokenizer": "clap-ds-tests/none"}
    config = commands.write_training(tmp_path, clap={"data": data, "train": {"samples": 8}})
    with socket.create_server(("127.0.0.1", 0), backlog=32) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        # As by HF_ENDPOINT and without HF_HUB_OFFLINE, which are read once, perhaps before these ranks were forked.
        constants = {"huggingface_hub.constants.HF_HUB_OFFLINE": False, "huggingface_hub.constants.ENDPOINT": url}
        ranks = commands.RunningRanks(config, 2, constants=constants)
        assert ranks.wait() == [2, 2], ranks.outputs
        server.settimeout(0)
        server.accept()[0].close()
        with pytest.raises(BlockingIOError):
            server.accept()  # nobody else has asked
    output = "".join(ranks.outputs)
    (error,) = [line for line in output.splitlines() if "error" in line.lower()]
    assert error.startswith("error: clap.data.tokenizer: no tokenizer 'clap-ds-tests/none'; tried: ")
    assert f"the hub: {url} can't be reached (no answer within 4 s)" in error
    assert "Traceback" not in output
    assert commands.summaries(config)[0]["state"] == "failed"
