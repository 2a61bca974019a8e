"""A checkpoint's evaluation from its weights to the table; what to evaluate and how is the command line's business."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from clap_ds.config.errors import UserError
from clap_ds.config.model import ClapConfig, load_preset
from clap_ds.config.sections import EvaluationSettings
from clap_ds.dist import distributed
from clap_ds.dist.agreement import together
from clap_ds.dist.distributed import Ranks
from clap_ds.evaluation.evaluator import Evaluator
from clap_ds.evaluation.report import print_evaluation
from clap_ds.native.convert import convert
from clap_ds.record import hardware
from clap_ds.record.directory import quiet_deepspeed
from clap_ds.record.terminal import Progress
from clap_ds.weights.load import load_weights, locate, tokenizer_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TEXT_TOKENS = 77
NUM_ADVANCES = 20


@dataclass(frozen=True)
class Options:
    """How to evaluate.

    Attributes:
        checkpoint: anything `load_weights` takes.
        preset: sizes to expect; None: the checkpoint's own.
        text_tokens: caption length, padding included; None: 77, or as many as the model takes.
        micro_batch: clips per rank and forward pass.
        precision: of the model, a name in `DTYPES`.
        json_path: file to write the results to.
    """

    checkpoint: str
    preset: str | None
    text_tokens: int | None
    micro_batch: int
    precision: str
    json_path: Path | None


def evaluate_checkpoint(settings: EvaluationSettings, options: Options, ranks: Ranks) -> None:
    """Load, evaluate, print a table and write the JSON. A collective.

    Raises:
        UserError: on every rank, for a mistake found on any.
    """
    device = distributed.initialize(ranks, compile_cpu_collective=False)
    quiet_deepspeed()
    path = together(lambda: locate(options.checkpoint))
    checkpoint = together(lambda: load_weights(path, load_preset(options.preset) if options.preset else None))
    text_tokens = together(lambda: _text_tokens(options.text_tokens, checkpoint.config))
    evaluator = together(
        lambda: Evaluator(
            settings,
            model_config=checkpoint.config,
            tokenizer_name=settings.tokenizer or _tokenizer(path, checkpoint.config),
            text_tokens=text_tokens,
            micro_batch=options.micro_batch,
            ranks=ranks,
            device=device,
        )
    )
    model = checkpoint.build(attention="auto").to(device, DTYPES[options.precision])
    if device.type == "cpu":
        convert(model)
    shown = _Shown(evaluator.num_batches, ranks)
    try:
        with shown:
            evaluation = evaluator.evaluate(model, resample=True, on_batch=shown.count)
    except ValueError as error:  # on all ranks alike
        raise UserError(str(error)) from None
    if ranks.is_first:
        where = {
            "checkpoint": str(path),
            "model": checkpoint.config.name,
            "world_size": ranks.world_size,
            "device_name": hardware.device_name(device),
            "precision": options.precision,
            "text_tokens": text_tokens,
        }
        title = "{checkpoint}: {model} on {world_size} × {device_name}, {precision}, {text_tokens} text tokens"
        print_evaluation(evaluation, title.format_map(where))
        if options.json_path is not None:
            options.json_path.write_text(json.dumps({**where, **evaluation.to_dict()}, indent=1) + "\n")


class _Shown(Progress):
    """Progress of embedding, told some twenty times."""

    def __init__(self, num_batches: int, ranks: Ranks) -> None:
        super().__init__(num_batches, enabled=ranks.is_first)
        self._every = max(1, num_batches // NUM_ADVANCES)
        self._pending = 0

    def count(self) -> None:
        """One more micro-batch is done."""
        self._pending += 1
        if self._pending == self._every:
            self.advance(self._pending, "micro-batches of clips embedded")
            self._pending = 0


def _text_tokens(wanted: int | None, config: ClapConfig) -> int:
    most = config.text.max_tokens
    if wanted is not None and not 2 <= wanted <= most:
        raise ValueError(f"--text_tokens: {config.name} has positions for 2 to {most} tokens, found {wanted}")
    return wanted or min(TEXT_TOKENS, most)


def _tokenizer(path: Path, config: ClapConfig) -> str | None:
    """The tokenizer that goes with a checkpoint: its own, that beside a transformers model, or the hub's of these sizes."""
    if path.is_dir() and (path / "tokenizer_config.json").exists():
        return str(path)
    return tokenizer_of(path) or config.text.hub_name or None
