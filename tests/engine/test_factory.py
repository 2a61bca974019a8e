"""Optimizer groups, learning rates by tower and schedule, and errors of DeepSpeed's setup."""

import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import CosineAnnealingLR

from clap_ds.config.model import load_preset
from clap_ds.config.schema import TrainSettings
from clap_ds.distributed.collectives import raise_on_all_ranks
from clap_ds.distributed.init import Ranks
from clap_ds.engine.factory import WarmupStableDecayLR, fetch_from_hub, parameter_groups
from clap_ds.engine.optimizer import scale_rates
from clap_ds.model.clap import ClapModel
from clap_ds.utils.errors import CollectiveUserError
from clap_ds.weights import hub
from tests.training import reference_steps as reference


@pytest.mark.parametrize(
    "preset",
    ["htsat_tiny_roberta_base", "htsat_base_roberta_base", "htsat_tiny_multilingual_e5_small"],
)
def test_parameters_of_published_presets_start_aligned_in_their_flat_group(preset):
    """Two position tables of 900 elements can't both; nothing comes behind them."""
    with torch.device("meta"):
        model = ClapModel(load_preset(preset)).bfloat16()
    for group in parameter_groups(model, TrainSettings()):
        sizes = [parameter.numel() for parameter in group["params"]]
        starts = itertools.accumulate(sizes, initial=0)
        misaligned = [size for start, size in zip(starts, sizes, strict=False) if start % 8]
        assert misaligned in ([], [900]), group["name"]


def test_scaled_rates_hold_during_a_step_and_follow_the_schedule():
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups = [{"params": parameters[:1]}, {"params": parameters[1:], "lr_scale": 0.1}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    schedule = CosineAnnealingLR(optimizer, T_max=4)
    scale_rates(optimizer)
    rates = []
    for _ in range(4):
        rates += schedule.get_last_lr()[:1]
        for parameter in parameters:
            parameter.grad = torch.ones(1)
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([(1 + math.cos(math.pi * step / 4)) / 2 for step in range(4)])
    weights = [parameter.item() for parameter in parameters]
    assert weights == pytest.approx([-sum(rates), -0.1 * sum(rates)])


def test_groups_have_decay_and_rate_of_their_parameters():
    model = ClapModel(load_preset("micro"), learns_bias=True)
    names_of = {id(parameter): name for name, parameter in model.named_parameters()}
    groups_of = {}
    for group in parameter_groups(model, TrainSettings(lr_scale={"text": 0.1})):
        for parameter in group["params"]:
            groups_of[names_of[id(parameter)]] = group
    assert len(groups_of) == len(names_of)
    for name, group in groups_of.items():
        assert group.get("lr_scale", 1.0) == (0.1 if name.startswith("text.") else 1.0), name
        is_matrix = model.get_parameter(name).ndim > 1
        is_decayed = is_matrix and not name.endswith("relative_position_bias")
        assert group.get("weight_decay") == (None if is_decayed else 0.0), name
    fp32 = {name for name, group in groups_of.items() if group["name"] == "fp32"}
    assert fp32 == {"logit_bias", "audio.batch_norm.weight", "audio.batch_norm.bias"}


def _fetch_missing_weights() -> tuple[str, int]:
    """Return the error's message, and how often this rank asked the hub."""
    num_calls = 0

    def load_by_name(*_: Any, **options: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        raise ValueError("not on the hub")

    ranks = Ranks(dist.get_rank(), 2, dist.get_rank(), 2)
    run = reference.settings(model={"preset": "htsat_tiny_roberta_base", "pretrained_text": True})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hub, "load_by_name", load_by_name)
        with pytest.raises(CollectiveUserError) as error, raise_on_all_ranks():
            fetch_from_hub(run.clap.model, run.clap.data, ranks)
    return str(error.value), num_calls


def test_fetch_of_missing_weights_asks_on_one_rank_and_stops_all(two_ranks):
    assert two_ranks.run(_fetch_missing_weights) == [("not on the hub", 1), ("not on the hub", 0)]


def _set_up_with_rejected_section() -> str:
    """Return the error of a section that only DeepSpeed checks, by a KeyError without its
    launcher's variables."""
    run = reference.run_settings(checkpoint={"writer": {"type": "FAST"}})
    with pytest.raises(ValueError, match="DeepSpeed rejects the configuration") as error:
        reference.engine_of(run, ClapModel(run.clap.preset()))
    return str(error.value)


def test_error_of_deepspeeds_setup_is_a_user_error(one_rank):
    (message,) = one_rank.run(_set_up_with_rejected_section)
    assert "CROSS_SIZE" in message


def list_rates(num_steps: int, **options: Any) -> list[float]:
    """Return the rates of the first steps, from 2.0."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=2.0)
    schedule = WarmupStableDecayLR(optimizer, **options)
    rates = list[float]()
    for _ in range(num_steps):
        rates += schedule.get_last_lr()
        optimizer.step()
        schedule.step()
    return rates


def test_wsd_rates_are_open_clips():
    rates = list_rates(
        10, total_num_steps=8, decay_num_steps=4, warmup_num_steps=2, min_ratio=0.1, decay_power=2.0
    )
    assert rates == pytest.approx([1, 2, 2, 2, 2, 1.2125, 0.65, 0.3125, 0.2, 0.2])


def test_wsd_cosine_over_all_steps_after_the_warm_up_is_open_clips():
    """open_clip's rates are lr · (1 + cos(π (step - warm-up) / (steps - warm-up))) / 2."""
    rates = list_rates(8, total_num_steps=8, decay_num_steps=6, warmup_num_steps=2, cosine=True)
    decayed = [1 + math.cos(math.pi * step / 6) for step in range(6)]
    assert rates == pytest.approx([1.0, 2.0, *decayed])


def test_wsd_with_impossible_steps_is_refused():
    with pytest.raises(ValueError, match=r"scheduler\.params"):
        list_rates(1, total_num_steps=8, decay_num_steps=9)
