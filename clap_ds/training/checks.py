"""Check what training requires of a run's JSON, before torch is imported."""

from typing import Any

from clap_ds.config import metrics
from clap_ds.config.batch_sizes import BatchSizes
from clap_ds.config.schema import ShardData
from clap_ds.config.settings import ClapSettings
from clap_ds.data.shard_io import check_url, is_remote


def problems_for_training(
    clap: ClapSettings, deepspeed: dict[str, Any], world_size: int | None = None
) -> list[str]:
    """Return what prevents training on `world_size` ranks, if known: one line per problem, with
    field and expectation."""
    train = clap.train
    evaluation = clap.evaluation
    problems = []
    sizes = BatchSizes.of(deepspeed, world_size)
    micro_batches = sizes.accumulation_steps if train.accumulation == "gradcache" else 1
    if (world_size or 2) * sizes.micro_batch * micro_batches == 1:
        problems.append(
            "train_micro_batch_size_per_gpu: 1 on 1 rank gives batches of one pair, which have no negatives: increase it, or"
            ' set clap.train.accumulation "gradcache" with gradient_accumulation_steps above 1'
        )
    if train.batch_ramp:
        problems += _problems_with_ramp(train.batch_ramp, sizes, world_size)
    if train.max_samples is None and train.epochs is None:
        problems.append("clap.train: max_samples and epochs are missing: set one of them")
    data = clap.data
    if train.epochs is not None and not (isinstance(data, ShardData) and data.has_epochs):
        without = "synthetic data, mixtures and clap.data.resampled"
        problems.append(f"clap.train.epochs: {without} have no epochs; set clap.train.max_samples")
    named = [("clap.train.target_metrics", name) for name in train.target_metrics]
    if clap.checkpoint.best_metric is not None:
        named.append(("clap.checkpoint.best_metric", clap.checkpoint.best_metric))
    known = metrics.names(evaluation)
    problems += [
        f"{field}: no evaluation computes {name!r}; available: {', '.join(known) or 'none, as clap.evaluation is empty'}"
        for field, name in named
        if name not in known
    ]
    if train.target_metrics and evaluation.every_steps is None:
        problems.append("clap.train.target_metrics: clap.evaluation.every_steps is missing; set it")
    return problems + _problems_with_urls(clap)


def _problems_with_ramp(
    ramp: list[list[int]], sizes: BatchSizes, world_size: int | None
) -> list[str]:
    starts, batches = zip(*ramp, strict=True)
    problems = {
        "expected increasing numbers of samples, the first 0": [*starts] != sorted({0, *starts})
    }
    if world_size is not None:
        unit = sizes.micro_step
        whole = sizes.global_batch
        wrong = [batch for batch in batches if batch < unit or batch % unit]
        problems[f"expected multiples of {unit}, the micro-batches of all ranks, found {wrong}"] = (
            wrong != []
        )
        problems[
            f"expected the run's global batch {whole} as the last one, found {batches[-1]}"
        ] = batches[-1] != whole
    return [
        f"clap.train.batch_ramp: {problem}" for problem, is_there in problems.items() if is_there
    ]


def _problems_with_urls(clap: ClapSettings) -> list[str]:
    """Return URLs with credentials or unsupported protocols; connects to nothing. Those of shards
    are checked with them."""
    problems = []
    for field, url in (
        ("checkpoint.remote_sync", clap.checkpoint.remote_sync),
        ("train.resume", clap.train.resume),
    ):
        try:
            if url and is_remote(url):
                check_url(url)
        except ValueError as error:
            problems.append(f"clap.{field}: {error}")
    return problems
