"""Reference steps of several ranks, computed in one process with plain torch from all ranks'
micro-batches."""

import itertools
import json
import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clap_ds.config.settings import RunSettings, load_run
from clap_ds.data.batch import Batch
from clap_ds.data.dataloader import BatchSource, build_batches
from clap_ds.engine.engine import ClapEngine
from clap_ds.engine.loss import build_loss
from clap_ds.model.clap import ClapModel
from tests.conftest import micro_run

CPU = torch.device("cpu")
CLAP_FIELDS = (
    "train", "evaluation", "checkpoint", "data", "loss", "text_packing", "gradient_sync", "profile",
)  # fmt: skip


def run_settings(world_size: int | None = None, **changes: Any) -> RunSettings:
    """`micro_run` as settings, with gradients in many buckets."""
    clap = {"bucket_cap_mb": 0.05, **changes.pop("clap", {})}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(micro_run(**changes, clap=clap), file)
        file.flush()
        return load_run(file.name, world_size)


def settings(**changes: Any) -> RunSettings:
    """Return an fp32 micro run with plain SGD, so that weights show the gradient. `CLAP_FIELDS` and
    `model` go into `clap`."""
    clap = {name: changes.pop(name) for name in CLAP_FIELDS if name in changes}
    if "model" in changes:
        clap["model"] = {"preset": "micro", **changes.pop("model")}
    sgd = {"type": "SGD", "params": {"lr": 0.1}}
    plain = {"bf16": {"enabled": False}, "optimizer": sgd, "train_micro_batch_size_per_gpu": 3}
    return run_settings(**{**plain, **changes}, clap=clap)


def engine_of(run: RunSettings, model: ClapModel) -> ClapEngine:
    """Return a run's engine around a model, on a GPU if this process sees one."""
    model.to(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    loss = build_loss(run.clap.loss, run.precision)
    return ClapEngine(model, loss, run.deepspeed, run.clap, run.clap.train)


def batch_source(
    run: RunSettings, rank: int, world_size: int, number: int, device: torch.device = CPU
) -> BatchSource:
    """Return a rank's endless source, of which `number` micro-batches are different."""
    changes = {"num_batches": number, "caption_lengths": {"5": 1.0, "16": 1.0}}
    return build_batches(
        run.clap.data.model_copy(update=changes),
        model=run.clap.preset(),
        context_length=run.clap.context_length,
        micro_batch=run.micro_batch,
        rank=rank,
        world_size=world_size,
        seed=7,
        device=device,
    )


def micro_batches(run: RunSettings, rank: int, world_size: int, number: int) -> list[Batch]:
    """Return the first micro-batches of a rank, all different."""
    source = batch_source(run, rank, world_size, number)
    return [next(source) for _ in range(number)]


def contrastive_loss(
    audio_ND: Tensor, text_ND: Tensor, scale: Tensor, bias: Tensor | None, ids_NL: Tensor
) -> Tensor:
    """Symmetric cross entropy over all pairs or, with a bias, SigLIP's loss; equal captions are
    positives."""
    logits = scale * audio_ND @ text_ND.T
    same_NN = (ids_NL[:, None] == ids_NL).all(-1).float()
    if bias is not None:
        return -F.logsigmoid((2 * same_NN - 1) * (logits + bias)).sum() / len(logits)
    targets = same_NN / same_NN.sum(1, keepdim=True)
    return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2


def independent_loss(model: ClapModel, by_rank: list[list[Batch]]) -> Tensor:
    """Return the mean over micro-steps of the loss over all ranks' micro-batches."""
    losses = []
    for micro_step in zip(*by_rank, strict=True):
        batch_by_rank = [[batch] for batch in micro_step]
        losses.append(whole_loss(model, batch_by_rank))
    return torch.stack(losses).mean()


def whole_loss(model: ClapModel, by_rank: list[list[Batch]]) -> Tensor:
    """Return one loss over all micro-batches of all ranks, with separate forward passes in the
    ranks' order."""
    batches = [*itertools.chain.from_iterable(by_rank)]
    outputs = [model(*batch.model_inputs()) for batch in batches]
    audio, text, *_ = zip(*outputs, strict=True)
    # The same parameters in each output; only some losses have a bias.
    scale, *biases = outputs[0][2:]
    bias = biases[0] if biases else None
    ids_NL = torch.cat([batch.input_ids for batch in batches])
    return contrastive_loss(torch.cat(audio), torch.cat(text), scale, bias, ids_NL)
