"""Compare the engine's loss and weights with plain torch's, on two ranks."""

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from clap_ds.checkpoint.restore import engine_state, fp32_state
from clap_ds.config.model import INT16_SCALE
from clap_ds.config.schema import TrainSettings
from clap_ds.config.settings import RunSettings
from clap_ds.cpu_kernels.patch_model import patch_model
from clap_ds.data.batch import Batch
from clap_ds.data.dataloader import BatchSource
from clap_ds.engine.engine import NonFiniteError
from clap_ds.engine.factory import parameter_groups
from clap_ds.engine.loss import SoftmaxLoss
from clap_ds.model.clap import ClapModel
from tests.training.reference_steps import batch_source, engine_of, run_settings

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
    precision: str, accumulation: int, sync: str = "overlap", **changes: Any
) -> RunSettings:
    """Return a micro run with `PRECISIONS`."""
    sizes = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": accumulation}
    clap = {"gradient_sync": sync, **changes.pop("clap", {})}
    fields = {**PRECISIONS[precision], "optimizer": OPTIMIZER, **sizes, **changes}
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    return run_settings(world_size, **fields, clap=clap)


def batches_of(run: RunSettings) -> BatchSource:
    return batch_source(run, dist.get_rank(), dist.get_world_size(), 3, DEVICE)


def model_of(run: RunSettings) -> ClapModel:
    torch.manual_seed(3)
    model = ClapModel(run.clap.preset(), drop_path=0, text_dropout=0, spec_augment=False)
    if DEVICE.type == "cpu" and run.clap.cpu_kernels == "auto":
        patch_model(model)  # like the engine, so both sides use the same kernels
    return model


def roundings(actual: Tensor, expected: Tensor, smallest: float) -> float:
    """Return the largest difference in fp32 roundings of values at least as large as `smallest`."""
    unit = torch.finfo(torch.float32).eps * (expected.abs() + smallest)
    return float(((actual - expected).abs() / unit).max())


def _plain_step(
    model: ClapModel, batches: Iterator[Batch], precision: str, accumulation: int, clip: float
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Take a step with torch's DistributedDataParallel and AdamW. Return the mean loss, the norm of
    gradients before clipping, and the fp32 weights, which the model has rounded in bf16."""
    if precision == "bf16":
        # DeepSpeed also copies master weights from cast parameters.
        model.to(torch.bfloat16)
    ddp = DistributedDataParallel(model)
    loss_function = SoftmaxLoss(torch.float32 if precision == "fp32" else torch.bfloat16)
    losses = []
    for micro_step in range(accumulation):
        ddp.require_backward_grad_sync = micro_step == accumulation - 1
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=precision == "autocast"):
            features = ddp(*next(batches).tensors())
        losses.append(loss_function(*features) / accumulation)
        losses[-1].backward()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    masters = {}
    groups = []
    for group in parameter_groups(model, TrainSettings()):
        copies = [parameter.detach().clone().float() for parameter in group["params"]]
        for parameter, master in zip(group["params"], copies, strict=True):
            master.grad = parameter.grad.float()
            masters[names[id(parameter)]] = master
        groups.append({**group, "params": copies})
    norm = torch.nn.utils.clip_grad_norm_(masters.values(), clip or torch.inf)
    assert norm > 2 * clip
    torch.optim.AdamW(groups, **OPTIMIZER["params"]).step()
    return torch.stack(losses).sum().detach(), norm, masters


def _difference(precision: str, accumulation: int, clip: float, clap: dict[str, str]) -> float:
    """Return this rank's largest difference of a step's loss, resulting weights and statistics, in
    fp32 roundings."""
    run = settings(precision, accumulation, gradient_clipping=clip, clap=clap)
    engine = engine_of(run, model_of(run))
    engine.log_gradient_norm = True
    loss = engine.step(batches_of(run))
    plain = model_of(run).to(DEVICE)
    plain_loss, norm, masters = _plain_step(plain, batches_of(run), precision, accumulation, clip)
    assert float(engine.gradient_norm) == pytest.approx(float(norm), rel=1e-3)
    differences = [roundings(loss, plain_loss, 0.0)]
    weights = fp32_state(engine)
    for name, parameter in engine.model.named_parameters():
        # An update is about as large as the learning rate for any gradient.
        differences.append(roundings(weights[name], masters[name], LEARNING_RATE))
        rounded = weights[name].to(plain.get_parameter(name).dtype)
        assert torch.equal(parameter, rounded), f"{name} isn't its master's rounding"
    if dist.get_rank() == 0:
        # DDP copies rank 0's batch-norm statistics to all ranks; in the engine each rank has its
        # own, and rank 0's are saved.
        statistics = engine.model.audio.batch_norm
        plain_statistics = plain.audio.batch_norm
        differences.append(roundings(statistics.running_mean, plain_statistics.running_mean, 1.0))
        differences.append(roundings(statistics.running_var, plain_statistics.running_var, 0.0))
    # NaN if any is.
    return float(torch.tensor(differences).max())


# Loss and gradient are the same operations on the same numbers in all precisions (two ranks add
# once and halve exactly). The update isn't: the weight may differ by 2 roundings, the update by 2
# per moment, and a few more.
ROUNDINGS = 16


@pytest.mark.parametrize(
    ("precision", "accumulation", "clip", "cpu_kernels"),
    [
        ("fp32", 2, 0.0, "auto"),
        ("bf16", 2, 0.1, "auto"),
        ("bf16", 1, 0.0, "off"),
        ("autocast", 1, 0.1, "auto"),
    ],
)
def test_step_agrees_with_plain_ddp(two_ranks, precision, accumulation, clip, cpu_kernels):
    clap = {"cpu_kernels": cpu_kernels}
    differences = two_ranks.run(_difference, precision, accumulation, clip, clap)
    assert all(difference <= ROUNDINGS for difference in differences), differences


# The order of atomic additions differs on GPUs: four roundings of a bf16 gradient, 2¹⁶ fp32
# roundings each.
GPU_ROUNDINGS = 2**18


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("gpus", "implementation"),
    [("one_gpu", "torch"), ("one_gpu", "deepspeed"), ("two_gpus", "torch")],
)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_step_agrees_with_plain_ddp_on_gpus(request, precision, gpus, implementation):
    clap = {"optimizer_implementation": implementation}
    differences = request.getfixturevalue(gpus).run(_difference, precision, 2, 0.0, clap)
    assert all(difference <= GPU_ROUNDINGS for difference in differences), differences


def _step_from_scale(initial: float) -> list[float]:
    """Return the logit scale and its master after a step."""
    run = settings("bf16", 1, clap={"max_logit_scale": 5.0})
    model = model_of(run)
    model.logit_scale.data.fill_(math.log(initial))
    engine = engine_of(run, model)
    engine.step(batches_of(run))
    log_scales = (engine.model.logit_scale, fp32_state(engine)["logit_scale"])
    return [float(log_scale.exp()) for log_scale in log_scales]


@pytest.mark.parametrize(("initial", "bounded"), [(14.3, 5.0), (0.1, 1.0)])
def test_logit_scale_is_bounded_also_in_the_master_copy(two_ranks, initial, bounded):
    for scales in two_ranks.run(_step_from_scale, initial):
        assert scales == pytest.approx([bounded, bounded])


def _poisoned_on_rank_1(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Put a NaN into the first waveform of each batch on rank 1."""
    for batch in batches:
        poisoned = copy.copy(batch)
        if dist.get_rank() == 1:
            poisoned.audio = poisoned.audio / INT16_SCALE
            poisoned.audio[0, 0] = float("nan")
        yield poisoned


def _skip_steps(torch_adam: bool) -> tuple[list[str], list[int], str, list[float]]:
    """Take steps of which the second, fourth and fifth overflow.

    Return what the second step changes; the number of consecutive skips after it, and of all in the
    end by DeepSpeed's counter and in a checkpoint; the error after too many; and learning rates.
    """
    params = {"warmup_max_lr": 0.1, "warmup_num_steps": 10, "warmup_type": "linear"}
    run = settings("bf16", 1, scheduler={"type": "WarmupLR", "params": params})
    if torch_adam:
        run.deepspeed["optimizer"]["params"]["torch_adam"] = True
    engine = engine_of(run, model_of(run))
    engine.log_gradient_norm = True
    batches = batches_of(run)
    rates = []

    def step(*, poisoned: bool) -> None:
        rates.append(engine.deepspeed.get_lr()[0])
        engine.step(_poisoned_on_rank_1(batches) if poisoned else batches)

    step(poisoned=False)
    state_before = copy.deepcopy(engine.model.state_dict())
    step(poisoned=True)
    engine.check_loss()
    state = engine.model.state_dict()
    changed = [name for name in state if not torch.equal(state[name], state_before[name])]
    skips = [engine.consecutive_skips]
    step(poisoned=False)
    step(poisoned=True)
    step(poisoned=True)
    with pytest.raises(NonFiniteError) as error:
        engine.check_loss(at_once=True)
    skips += [engine.deepspeed.skipped_steps, engine_state(engine)["skipped_steps"]]
    return changed, skips, str(error.value), rates


@pytest.mark.parametrize(
    ("torch_adam", "expected_rates"),
    [
        # The flat step doesn't shift the schedule.
        (False, [0, 0, 0.01, 0.02, 0.03]),
        # DeepSpeed's wrapper around torch's AdamW.
        (True, [0, 0, 0, 0.01, 0.01]),
    ],
)
def test_steps_that_overflow_in_16_bits_are_skipped_and_counted(
    two_ranks, torch_adam, expected_rates
):
    for changed, skips, error, rates in two_ranks.run(_skip_steps, torch_adam):
        assert changed == []
        assert skips == [1, 3, 3]
        assert "in every step from step 4 on" in error
        assert rates == pytest.approx(expected_rates)


class NoReads(TorchDispatchMode):
    """An error whenever the host reads a number from a tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise AssertionError("the host reads a number")
        return func(*args, **(kwargs or {}))


def _step_without_reads(precision: str, accumulation: str) -> None:
    clap = {"cpu_kernels": "off", "train": {"accumulation": accumulation}}
    run = settings(precision, 2, gradient_clipping=1.0, clap=clap)
    engine = engine_of(run, model_of(run))
    engine.log_gradient_norm = True
    batches = batches_of(run)
    # The first step may read.
    engine.step(batches)
    with pytest.MonkeyPatch.context() as patch, NoReads():
        # Its reads aren't dispatched.
        patch.setattr(Tensor, "tolist", lambda tensor: tensor.flatten()[0].item())
        engine.step(batches)
        with pytest.raises(AssertionError, match="the host reads a number"):
            engine.check_loss()


@pytest.mark.parametrize(
    ("precision", "accumulation"), [("bf16", "gradcache"), ("autocast", "plain")]
)
def test_step_reads_nothing_on_the_host(two_ranks, precision, accumulation):
    two_ranks.run(_step_without_reads, precision, accumulation)
