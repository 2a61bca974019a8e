"""Compare learning rates by tower with torch's AdamW with a group per parameter, for every kind of
schedule.

Warm-up, constant rate and cooldown.
"""

import itertools
import math
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime import lr_schedules
from torch.optim import lr_scheduler

from clap_ds.checkpoint.restore import fp32_state
from clap_ds.config.model import load_preset
from clap_ds.config.schema import TrainSettings
from clap_ds.distributed.collectives import raise_on_all_ranks
from clap_ds.distributed.init import Ranks
from clap_ds.engine.factory import WarmupStableDecayLR, fetch_from_hub, parameter_groups
from clap_ds.model.clap import ClapModel
from clap_ds.utils.errors import CollectiveUserError
from clap_ds.weights import hub
from tests.engine import test_engine as on
from tests.engine.plain_ddp import PlainDDP
from tests.rank_pool import RankPool
from tests.training import reference_steps as reference

TUNING: dict[str, Any] = {"lr_scale": {"text": 0.1}}
SCHEDULES: dict[str, dict[str, Any]] = {
    "WarmupCosineLR": {"total_num_steps": 5, "warmup_num_steps": 2, "warmup_min_ratio": 0.1},
    "OneCycle": {
        "cycle_min_lr": 1e-4,
        "cycle_max_lr": 1e-3,
        "cycle_first_step_size": 3,
        "cycle_momentum": False,
    },
    "CosineAnnealingLR": {"T_max": 4, "eta_min": 1e-5},
}


def _difference(precision: str, kind: str, stepping: str) -> float:
    """Return the largest difference of weights from torch's DDP and AdamW over four clipped steps,
    in roundings."""
    scheduler = {"type": kind, "params": SCHEDULES[kind]}
    run = on.settings(
        precision, 1, gradient_clipping=0.1, scheduler=scheduler, clap={"train": TUNING}
    )
    plain = PlainDDP(on.model_of(run), 1, precision, "overlap", on.OPTIMIZER["params"], 0.1)
    nominal = torch.optim.SGD([torch.ones(1)], lr=on.LEARNING_RATE)
    schedule = (getattr(lr_schedules, kind, None) or getattr(lr_scheduler, kind))(
        nominal, **SCHEDULES[kind]
    )
    engine = on._engine(run, stepping)
    batches = on.batches_of(run)
    same_batches = on.batches_of(run)
    found = list[float]()
    decays = {name: p.ndim > 1 and "position_bias" not in name for name, p in plain.masters.items()}
    groups = [
        {"params": [p], "weight_decay": 0.2 * decays[name]} for name, p in plain.masters.items()
    ]
    plain.optimizer = torch.optim.AdamW(groups, **{**on.OPTIMIZER["params"], "weight_decay": 0.0})
    for _ in range(4):
        rate = nominal.param_groups[0]["lr"]
        assert {*engine.deepspeed.get_lr()} == {rate}
        for group, name in zip(plain.optimizer.param_groups, plain.masters, strict=True):
            group["lr"] = rate * (0.1 if name.startswith("text.") else 1.0)
        engine.step(batches)
        plain.step(same_batches)
        schedule.step()
        weights = fp32_state(engine)
        found += [
            on._roundings(weights[name], p, on.LEARNING_RATE) for name, p in plain.masters.items()
        ]
        plain.take(weights)
    return max(found)


@pytest.mark.parametrize(
    ("precision", "kind", "stepping"),
    [
        *(("fp32" if kind == "CosineAnnealingLR" else "bf16", kind, "") for kind in SCHEDULES),
        ("autocast", "WarmupCosineLR", ""),
        ("bf16", "WarmupCosineLR", "parameter by parameter"),
    ],
)
def test_updates_are_adamws_with_a_rate_for_each_tower(
    two_ranks: RankPool, precision: str, kind: str, stepping: str
) -> None:
    differences = two_ranks.run(_difference, precision, kind, stepping)
    assert all(difference <= on.ROUNDINGS for difference in differences), differences


@pytest.mark.parametrize("preset", ["htsat_tiny_roberta_base", "htsat_base_roberta_base"])
def test_every_parameter_of_published_presets_starts_aligned_in_its_flat_group(preset: str) -> None:
    """Two position tables of 900 elements can't both; nothing comes behind them."""
    with torch.device("meta"):
        model = ClapModel(load_preset(preset)).bfloat16()
    for group in parameter_groups(model, TrainSettings()):
        sizes = [parameter.numel() for parameter in group["params"]]
        starts = [0, *itertools.accumulate(sizes)]
        misaligned = [size for start, size in zip(starts, sizes, strict=False) if start % 8]
        assert misaligned in ([], [900]), group["name"]


def _starts_of_flat_groups() -> list[tuple[int, int]]:
    """Return the address, modulo 16, and the size of each 16-bit parameter of a micro model in its
    engine."""
    engine = on._engine(on.settings("bf16", 1), "")
    parameters = [each for each in engine.model.parameters() if each.dtype == torch.bfloat16]
    assert (
        len({parameter.untyped_storage().data_ptr() for parameter in parameters}) == 2
    )  # with and without decay
    return [(parameter.data_ptr() % 16, parameter.numel()) for parameter in parameters]


def test_parameters_of_even_size_start_aligned_in_deepspeeds_buffer(one_rank: RankPool) -> None:
    (starts,) = one_rank.run(_starts_of_flat_groups)
    assert any(size % 8 for _, size in starts)
    assert {remainder for remainder, size in starts if size % 8 == 0} == {0}


def _refusal() -> tuple[str, int]:
    """Return the message, and how often this rank looked."""
    ranks = Ranks(dist.get_rank(), 2, dist.get_rank(), 2)
    run = reference.settings(model={"preset": "htsat_tiny_roberta_base", "pretrained_text": True})
    with mock.patch.object(hub, "load_by_name", side_effect=ValueError("not on the hub")) as load:
        with pytest.raises(CollectiveUserError) as refused, raise_on_all_ranks():
            fetch_from_hub(run.clap.model, run.clap.data, ranks)
        return str(refused.value), load.call_count


def test_one_rank_looks_for_weights_and_all_stop(two_ranks: RankPool) -> None:
    assert two_ranks.run(_refusal) == [("not on the hub", 1), ("not on the hub", 0)]


def _refusal_of_deepspeed() -> str:
    """Return the error of a section that only DeepSpeed checks, by a KeyError without its
    launcher's variables."""
    run = reference.run_settings(checkpoint={"writer": {"type": "FAST"}})
    with pytest.raises(ValueError, match="DeepSpeed rejects the configuration") as refusal:
        reference.engine_of(run, ClapModel(run.clap.preset()))
    return str(refusal.value)


def test_any_error_of_deepspeeds_setup_is_a_user_error(one_rank: RankPool) -> None:
    assert "CROSS_SIZE" in one_rank.run(_refusal_of_deepspeed)[0]


def list_rates(number: int, **options: Any) -> list[float]:
    """Return the rates of the first steps, from 2.0."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=2.0)
    schedule = WarmupStableDecayLR(optimizer, **options)
    rates = list[float]()
    for _ in range(number):
        rates += schedule.get_last_lr()
        optimizer.step()
        schedule.step()
    return rates


@pytest.mark.parametrize(
    ("power", "cooled"), [(1.0, [1.55, 1.1, 0.65]), (2.0, [1.2125, 0.65, 0.3125])]
)
def test_rates_are_open_clips(power: float, cooled: list[float]) -> None:
    options = {"total_num_steps": 8, "decay_num_steps": 4, "warmup_num_steps": 2, "min_ratio": 0.1}
    assert list_rates(10, **options, decay_power=power) == pytest.approx(
        [1, 2, 2, 2, 2, *cooled, 0.2, 0.2]
    )


@pytest.mark.parametrize(
    "changes", [{"decay_num_steps": 9}, {"warmup_num_steps": 5}, {"min_ratio": 5}]
)
def test_steps_or_shares_that_do_not_fit_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"scheduler\.params"):
        list_rates(1, **{"total_num_steps": 8, "decay_num_steps": 4, **changes})


def test_cosine_over_all_steps_after_the_warm_up_is_open_clips_cosine() -> None:
    """open_clip's rates are lr · (step + 1) / warm-up, then lr · (1 + cos(π (step - warm-up) /
    (steps - warm-up))) / 2."""
    rates = list_rates(14, total_num_steps=14, decay_num_steps=10, warmup_num_steps=4, cosine=True)
    cooled = [1 + math.cos(math.pi * (step - 4) / 10) for step in range(4, 14)]
    assert rates == pytest.approx([0.5, 1.0, 1.5, 2.0, *cooled])
