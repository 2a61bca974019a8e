"""The bench command on a small model whose blocks pause, so that a CPU rank spends its step as a GPU rank does.

    python -m benchmarks.paced_bench --pause_s 1.5 --presets FOLDER CONFIG…

Everything is the project's own: engine, loss, gradient synchronisation, protocol, run directory. Only time is added: each
block sleeps for its share of `--pause_s` in forward and, twice as long, in backward, as if a GPU worked; meanwhile the core
is free for communication. What the small model really computes comes on top. Several configurations run one after the
other in one process. `benchmarks.validate_projection` starts this on several hosts.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clap_ds.config import model as model_config
from clap_ds.config.settings import load_run
from clap_ds.dist.distributed import Ranks, run_command
from clap_ds.engine.session import open_session
from clap_ds.measuring.throughput import measure
from clap_ds.model.clap import ClapModel


class _Pause(torch.autograd.Function):
    """Identity that takes `seconds` forward and twice that backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        time.sleep(seconds)
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> Any:
        time.sleep(2 * ctx.seconds)
        return gradient[0], None


def pace(model: ClapModel, pause_s: float) -> None:
    """Spread `pause_s` seconds a step over the blocks: half on each tower, a third forward, two thirds backward.

    Args:
        model: pauses from its next forward pass on, for good.
        pause_s: of one micro-batch's forward and backward together.
    """
    stages: Any = model.audio.stages
    text: Any = model.text
    audio_blocks = [block for stage in stages for block in stage.blocks]
    for blocks in (audio_blocks, list(text.roberta.encoder.layer)):
        for block in blocks:
            _pause_after(block, pause_s / 2 / 3 / len(blocks))


def _pause_after(block: nn.Module, seconds: float) -> None:
    def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (_Pause.apply(output[0], seconds), *output[1:])
        return _Pause.apply(output, seconds)

    block.register_forward_hook(hook)


def main(ranks: Ranks) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.paced_bench", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("configs", nargs="+", type=Path, metavar="CONFIG", help="JSON that describes a run")
    parser.add_argument("--pause_s", type=float, required=True, help="seconds a step that the blocks sleep")
    parser.add_argument("--presets", type=Path, help="folder of model presets to take instead of the project's")
    arguments = parser.parse_args()
    if arguments.presets:
        model_config.PRESET_DIR = arguments.presets
    runs = [load_run(path) for path in arguments.configs]
    for run in runs:
        with open_session(run, ranks) as session:
            pace(session.engine.model, arguments.pause_s)
            measure(session)
            if ranks.is_first:
                trained = sum(p.numel() for p in session.engine.model.parameters() if p.requires_grad)
                session.record.update_summary(num_parameters=trained, pause_s=arguments.pause_s)


if __name__ == "__main__":
    run_command(main)
