"""Reference steps of several ranks, computed in one process with plain torch from all ranks'
micro-batches."""

import json
import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clap_ds.config.settings import RunSettings, load_run
from clap_ds.data.batch import Batch
from clap_ds.data.dataloader import build_batches
from clap_ds.engine.engine import ClapEngine
from clap_ds.engine.loss import build_loss
from clap_ds.model.clap import ClapModel
from tests.conftest import micro_run

CPU = torch.device("cpu")


def run_settings(**changes: Any) -> RunSettings:
    """`micro_run` as settings, with gradients in many buckets."""
    clap = {"bucket_cap_mb": 0.05, **changes.pop("clap", {})}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(micro_run(**changes, clap=clap), file)
        file.flush()
        return load_run(file.name)


def settings(**changes: Any) -> RunSettings:
    """Return an fp32 micro run with plain SGD, so that weights show the gradient. `train`,
    `evaluation`, `checkpoint`, `data`, `loss`, `text_packing`, `gradient_sync` and `model` go into
    `clap`."""
    own = ("train", "evaluation", "checkpoint", "data", "loss", "text_packing", "gradient_sync")
    clap = {name: changes.pop(name) for name in own if name in changes}
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


def micro_batches(run: RunSettings, rank: int, world_size: int, number: int) -> list[Batch]:
    """Return the first micro-batches of a rank, all different."""
    data = run.clap.data.model_copy(
        update={"num_batches": number, "caption_lengths": {"5": 1.0, "16": 1.0}}
    )
    sizes: dict[str, Any] = {
        "context_length": run.clap.context_length,
        "micro_batch": run.micro_batch,
    }
    place: dict[str, Any] = {"rank": rank, "world_size": world_size, "seed": 7, "device": CPU}
    source = build_batches(data, model=run.clap.preset(), **sizes, **place)
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
    steps = zip(*by_rank, strict=True)
    return torch.stack(
        [whole_loss(model, [[batch] for batch in together]) for together in steps]
    ).mean()


def whole_loss(model: ClapModel, by_rank: list[list[Batch]]) -> Tensor:
    """Return one loss over all micro-batches of all ranks, with separate forward passes in the
    ranks' order."""
    outputs = [model(*batch.model_inputs()) for own in by_rank for batch in own]
    audio, text, scale, *bias = zip(*outputs, strict=True)
    ids_NL = torch.cat([batch.input_ids for own in by_rank for batch in own])
    return contrastive_loss(
        torch.cat(audio), torch.cat(text), scale[0], bias[0][0] if bias else None, ids_NL
    )
