"""Compare the engine's losses and weights with plain torch's step by step, on two ranks."""

import copy
import json
import math
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from clap_ds.checkpoint.restore import engine_state, fp32_state
from clap_ds.config.model import INT16_SCALE, load_preset
from clap_ds.config.schema import TrainSettings
from clap_ds.config.settings import RunSettings, load_run
from clap_ds.cpu_kernels.patch_model import patch_model
from clap_ds.data.batch import Batch
from clap_ds.data.dataloader import build_batches
from clap_ds.engine.engine import ClapEngine, NonFiniteError
from clap_ds.engine.factory import parameter_groups
from clap_ds.model.clap import ClapModel
from tests.conftest import micro_run
from tests.engine.plain_ddp import PlainDDP
from tests.rank_pool import RankPool
from tests.training.reference_steps import engine_of

# A pool of CPU ranks sees no GPU.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LEARNING_RATE = 1e-3
# Adam's epsilon matters, so that gradients that are off by a constant factor also change the
# weights.
OPTIMIZER: dict[str, Any] = {
    "type": "AdamW",
    "params": {"lr": LEARNING_RATE, "eps": 1e-3, "weight_decay": 0.2},
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {"bf16": {"enabled": False}},
    "bf16": {"bf16": {"enabled": True}},
    "autocast": {
        "bf16": {"enabled": False},
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
    },
}


def settings(
    precision: str, accumulation: int | None, sync: str = "overlap", **changes: Any
) -> RunSettings:
    """Return a micro run with `PRECISIONS`; without accumulation the global batch of 12 is set."""
    clap = {"gradient_sync": sync, "bucket_cap_mb": 0.05}
    sizes = {"train_batch_size": None if accumulation else 12, "train_micro_batch_size_per_gpu": 3}
    sizes["gradient_accumulation_steps"] = accumulation
    content = micro_run(
        **{**PRECISIONS[precision], "optimizer": OPTIMIZER, **sizes, "clap": clap, **changes}
    )
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(content, file)
        file.flush()
        return load_run(file.name, dist.get_world_size() if dist.is_initialized() else 1)


def batches_of(run: RunSettings) -> Any:
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    return build_batches(
        run.clap.data.model_copy(update={"num_batches": 3, "caption_lengths": {"5": 1.0, "16": 1.0}}),
        model=run.clap.preset(), context_length=run.clap.context_length, micro_batch=run.micro_batch,
        rank=rank, world_size=world_size, seed=7, device=DEVICE,
    )  # fmt: skip


def model_of(run: RunSettings) -> ClapModel:
    torch.manual_seed(3)
    model = ClapModel(run.clap.preset(), drop_path=0, text_dropout=0, spec_augment=False)
    if DEVICE.type == "cpu":
        patch_model(model)  # like the engine, so both sides use the same kernels
    return model


def _engine(run: RunSettings, stepping: str) -> ClapEngine:
    if stepping == "parameter by parameter":
        run.deepspeed["optimizer"]["params"]["torch_adam"] = True
    return engine_of(run, model_of(run))


def _roundings(ours: Tensor, theirs: Tensor, smallest: float) -> float:
    """Return the largest difference in fp32 roundings of values at least as large as `smallest`."""
    return float(
        ((ours - theirs).abs() / (torch.finfo(torch.float32).eps * (theirs.abs() + smallest))).max()
    )


def _difference(
    precision: str,
    accumulation: int | None,
    sync: str,
    stepping: str = "",
    steps: int = 10,
    clip: float = 0.0,
) -> float:
    """Return this rank's largest difference of any step's loss or resulting weight, in fp32
    roundings.

    Both sides start each step from the engine's weights, with their own moments, gradients and
    batches. Otherwise weights that differ in fp32's last bit, as with torch's fused and plain
    AdamW, would eventually be cast to different bf16 numbers. Their difference is 2¹⁶ times as
    large, and no rounding bound holds in the next step.
    """
    run = settings(precision, accumulation, sync, gradient_clipping=clip)
    if "FusedAdam" in stepping:
        run.clap = run.clap.model_copy(update={"optimizer_implementation": "deepspeed"})
    model = model_of(run).to(DEVICE)
    params = OPTIMIZER["params"]
    engine = _engine(run, stepping)
    plain = PlainDDP(model, accumulation or 2, precision, sync, params, clip)
    engine.norm_wanted = True
    batches = batches_of(run)
    plain_batches = batches_of(run)
    found = []
    for _ in range(steps):
        loss = engine.step(batches).cpu()
        plain_loss = torch.tensor(plain.step(plain_batches))
        assert float(engine.gradient_norm) == pytest.approx(plain.norm, rel=1e-3)  # type: ignore[arg-type]
        found.append(_roundings(loss, plain_loss, 0.0))
        weights = fp32_state(engine)
        assert weights.keys() == plain.model.state_dict().keys()
        # An update is about as large as the learning rate for any gradient.
        found += [
            _roundings(weights[name], master, LEARNING_RATE)
            for name, master in plain.masters.items()
        ]
        plain.take(weights)
        for name, parameter in engine.model.named_parameters():
            assert torch.equal(parameter, plain.model.get_parameter(name)), (
                f"{name} isn't its master's rounding"
            )
    if dist.get_rank() == 0:
        # DDP copies rank 0's batch-norm statistics to all ranks; in the engine each rank has its
        # own, and rank 0's are saved.
        ours, theirs = (module.audio.batch_norm for module in (engine.model, plain.model))
        found.append(_roundings(ours.running_mean, theirs.running_mean, 1.0))
        found.append(_roundings(ours.running_var, theirs.running_var, 0.0))
    return float(torch.tensor(found).max())  # NaN if any is


# Loss and gradient are the same operations on the same numbers in all precisions (two ranks add
# once and halve exactly). The update isn't: the weight may differ by 2 roundings, the update by 2
# per moment for each of up to ten steps, and a few more.
ROUNDINGS = 64


@pytest.mark.parametrize(
    ("precision", "accumulation", "sync", "stepping", "clip"),
    [
        *((precision, 2, "overlap", "", clip) for precision in PRECISIONS for clip in (0.0, 0.1)),
        ("bf16", 1, "overlap", "", 0.0),
        ("fp32", None, "deepspeed", "", 0.0),
        ("bf16", None, "deepspeed", "parameter by parameter", 0.0),
    ],
)
def test_steps_agree_with_plain_ddp(
    two_ranks: RankPool,
    precision: str,
    accumulation: int | None,
    sync: str,
    stepping: str,
    clip: float,
) -> None:
    differences = two_ranks.run(_difference, precision, accumulation, sync, stepping, 3, clip)
    assert all(difference <= ROUNDINGS for difference in differences), differences


# The order of atomic additions differs on GPUs: four roundings of a bf16 gradient, 2¹⁶ fp32
# roundings each.
GPU_ROUNDINGS = 2**18


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("gpus", "sync", "stepping"),
    [
        *(("one_gpu", "overlap", stepping) for stepping in ("flat", "DeepSpeed's FusedAdam")),
        *(("two_gpus", sync, "flat") for sync in ("overlap", "deepspeed")),
    ],
)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_ten_steps_agree_with_plain_ddp_on_gpus(
    request: pytest.FixtureRequest, precision: str, gpus: str, sync: str, stepping: str
) -> None:
    differences = request.getfixturevalue(gpus).run(_difference, precision, 2, sync, stepping)
    assert all(difference <= GPU_ROUNDINGS for difference in differences), differences


def _scales_after_a_step(precision: str, first: float) -> tuple[list[float], set[str]]:
    """Return the logit scale and its master after a step from `first`, and names of fp32
    parameters."""
    run = settings(precision, 1)
    run.clap = run.clap.model_copy(update={"max_logit_scale": 5.0})
    model = model_of(run)
    model.logit_scale.data.fill_(math.log(first))
    engine = engine_of(run, model)
    engine.step(batches_of(run))
    scales = [
        float(each.exp()) for each in (engine.model.logit_scale, fp32_state(engine)["logit_scale"])
    ]
    fp32 = {
        name
        for name, parameter in engine.model.named_parameters()
        if parameter.dtype == torch.float32
    }
    return scales, fp32


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("first", "bounded"), [(14.3, 5.0), (0.1, 1.0)])
def test_logit_scale_is_bounded_also_in_the_master_copy_and_stays_fp32(
    two_ranks: RankPool, precision: str, first: float, bounded: float
) -> None:
    for scales, fp32 in two_ranks.run(_scales_after_a_step, precision, first):
        assert scales == pytest.approx([bounded, bounded])
        kept = {"logit_scale", "audio.batch_norm.weight", "audio.batch_norm.bias"}
        assert fp32 == kept if precision == "bf16" else fp32 > kept


def test_biases_norms_position_biases_and_scalars_are_not_decayed() -> None:
    model = ClapModel(load_preset("micro"), learns_bias=True)
    model.text.requires_grad_(False)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = {group["name"]: group for group in parameter_groups(model, TrainSettings())}
    decays = {"decay": None, "no_decay": 0.0, "fp32": 0.0, "logit_scale": 0.0}
    assert {name: group.get("weight_decay") for name, group in groups.items()} == decays
    found = {
        name: {names[id(parameter)] for parameter in group["params"]}
        for name, group in groups.items()
    }
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert set.union(*found.values()) == trained
    tables = {name for name in trained if name.endswith("relative_position_bias")}
    assert (
        found["decay"] == {name for name in trained if model.get_parameter(name).ndim > 1} - tables
    )
    assert found["fp32"] == {"logit_bias", "audio.batch_norm.weight", "audio.batch_norm.bias"}


def _poisoned_on_rank_1(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Put a NaN into the first waveform of each batch on rank 1."""
    for batch in batches:
        poisoned = copy.copy(batch)
        if dist.get_rank() == 1:
            poisoned.audio = poisoned.audio / INT16_SCALE
            poisoned.audio[0, 0] = float("nan")
        yield poisoned


def _skipped_steps(
    sync: str, stepping: str
) -> tuple[list[str], list[int], str, list[float], list[int]]:
    """Return names of what a skipped step changes, numbers of steps skipped in a row after it and
    in total, the error after too many, all learning rates, and a checkpoint's number of skipped
    steps."""
    warm_up = {
        "type": "WarmupLR",
        "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 10, "warmup_type": "linear"},
    }
    run = settings("bf16", 1, sync, scheduler=warm_up)
    engine = _engine(run, stepping)
    batches = batches_of(run)
    rates = list[float]()
    engine.norm_wanted = True

    def step(*, poisoned: bool) -> None:
        rates.append(engine.deepspeed.get_lr()[0])
        engine.step(_poisoned_on_rank_1(batches) if poisoned else batches)

    step(poisoned=False)
    before = copy.deepcopy(engine.model.state_dict())
    step(poisoned=True)
    engine.check_loss()
    changed = [
        name
        for name, tensor in engine.model.state_dict().items()
        if not torch.equal(tensor, before[name])
    ]
    counted = [engine.consecutive_skips]
    for poisoned in (False, True, True):
        step(poisoned=poisoned)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("clap_ds.engine.engine.MAX_CONSECUTIVE_SKIPS", 2)
        with pytest.raises(NonFiniteError) as caught:
            engine.check_loss()
    saved = engine_state(engine)["skipped_steps"]
    return changed, [*counted, engine.deepspeed.skipped_steps], str(caught.value), rates, saved


@pytest.mark.parametrize(
    ("sync", "stepping"), [("overlap", ""), ("deepspeed", "parameter by parameter")]
)
def test_steps_that_overflow_in_16_bits_are_skipped_and_counted_while_training(
    two_ranks: RankPool, sync: str, stepping: str
) -> None:
    """Check also that the flat step doesn't shift the schedule."""
    for changed, counted, end, rates, saved in two_ranks.run(_skipped_steps, sync, stepping):
        assert changed == []
        assert counted == [1, 3]
        assert end == "the loss or its gradient is NaN or infinite in every step from step 4 on"
        assert rates == pytest.approx(
            [0, 0, 0.01, 0.02, 0.03] if not stepping else [0, 0, 0, 0.01, 0.01]
        )
        assert saved == 3
