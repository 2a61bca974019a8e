"""What is found and said before a run's first step, and of its loader."""

import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from deepspeed.ops.op_builder import FusedAdamBuilder

from clap_ds.config.errors import AgreedError
from clap_ds.config.settings import load_run
from clap_ds.data.supply import Supply
from clap_ds.engine.building import build_model, fetch_from_hub, wrap
from clap_ds.engine.session import Session, check_deepspeed_sections, times_host_alone
from clap_ds.model import text
from clap_ds.ranks.agreement import agreed
from clap_ds.ranks.distributed import Ranks
from tests.rank_pool import RankPool
from tests.training import training_commands as commands
from tests.training.reference_steps import CPU, settings


def test_a_rank_has_its_part_of_the_global_batch(write_run: Callable[..., Path]) -> None:
    run: Any = load_run(write_run(train_batch_size=24, gradient_accumulation_steps=None), 2)
    session = Session(run, Ranks(0, 2, 0, 2), *[None] * 5)  # type: ignore[arg-type]
    assert (session.samples_per_step, run.micro_batch) == (12, 4)


def test_what_cannot_run_here_is_one_line(write_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    run = load_run(write_run(clap={"fused_adam": "deepspeed"}))
    failing = RuntimeError("Error building extension 'fused_adam'\nand more")
    monkeypatch.setattr(FusedAdamBuilder, "load", mock.Mock(side_effect=failing))
    with pytest.raises(ValueError, match=r"clap\.fused_adam: Error building extension 'fused_adam'; 'torch' needs no"):
        wrap(build_model(run, CPU), run)
    run = load_run(write_run(clap={"model": {"preset": "micro"}, "compile": "towers"}))
    monkeypatch.setattr(torch, "__file__", "/home/new comer/torch/__init__.py")
    with pytest.raises(ValueError, match=r"clap\.compile: .*path has a space"):
        build_model(run, CPU)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"wandb": {"enabled": True}}, r"wandb\.enabled: wandb is not installed; pip install wandb"),
        ({"comet": {"enabled": True}}, r"comet\.enabled: comet_ml is not installed"),
        ({"tensorboard": {"enabled": True, "output_path": "/proc/x"}}, r"tensorboard\.output_path: .*'/proc/x'"),
        ({"csv_monitor": {"enabled": True, "output_path": "/proc/x"}}, r"csv_monitor\.output_path: .*'/proc/x'"),
        ({"tensorboard": {"enabled": True, "output": "x"}}, "DeepSpeed refuses the configuration"),
    ],
)
def test_what_one_rank_would_find_while_others_wait_is_told_before(
    write_run: Callable[..., Path], section: dict[str, Any], message: str
) -> None:
    run = load_run(write_run(**section))
    with pytest.raises(ValueError, match=message):
        check_deepspeed_sections(run.deepspeed, run.path)


def test_rates_of_the_host_alone_are_deepspeeds_on_a_gpu_without_synchronising() -> None:
    def said(device: str, synchronized: bool, enabled: bool = True) -> bool:
        timer: Any = SimpleNamespace(config=SimpleNamespace(synchronized=synchronized, enabled=enabled))
        return times_host_alone(timer, torch.device(device))

    assert said("cuda", synchronized=False)
    assert not any((said("cuda", True), said("cpu", False), said("cuda", False, enabled=False)))


def test_the_loader_is_compared_with_steps_that_have_warmed_up(capsys: pytest.CaptureFixture[str]) -> None:
    """A first step, which may have compiled for a minute, isn't one even where it is logged alone."""
    parts: dict[str, Any] = dict.fromkeys(("run", "device", "record", "engine", "scalars"))
    ranks: Any = SimpleNamespace(is_first=True, local_world_size=1)
    batches: Any = SimpleNamespace(supply=lambda: Supply(100.0, 1, "mel"))
    session = Session(**parts, ranks=ranks, batches=batches)
    session.tell_supply([0.1])
    assert not capsys.readouterr().out
    session.tell_supply([200.0])
    session.tell_supply([300.0])
    assert capsys.readouterr().out.count("the step of their rank takes 200: it will wait") == 1


def _refusal() -> tuple[str, int]:
    """The message, and how often this rank looked."""
    ranks = Ranks(dist.get_rank(), 2, dist.get_rank(), 2)
    run = settings(model={"preset": "htsat_tiny_roberta_base", "text_from_hub": True})
    with mock.patch.object(text, "load_by_name", side_effect=ValueError("not on the hub")) as load:
        with pytest.raises(AgreedError) as refused, agreed():
            fetch_from_hub(run, ranks)
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
    assert commands.summaries(config)[0]["state"] == "failed"
