"""Command: how right a plan's memory is, by what the CPU's allocator holds in a step of the engine, by torch's profiler.

    python -m benchmarks.plan_validation [--output results/cpu/plan/memory.md]

Time is told by GPUs alone (`make gpu-check`).
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import allocated_peak, make_parser, show, table
from clap_ds.config.errors import run_alone
from clap_ds.config.settings import ClapSettings, RunSettings
from clap_ds.data.sources import build_batches
from clap_ds.planning.step import trace_step
from clap_ds.ranks import distributed
from clap_ds.record.clock import PhaseTimer
from clap_ds.record.hardware import device_name

OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.1}}
PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": {"enabled": True}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "fp32": {},
}
SIZES = {"micro": (64, 64), "demo": (16, 64), "htsat_tiny_roberta_base": (16, 77)}
"""Micro-batch and text tokens by preset."""
LARGE = (("bf16", "padded"), ("autocast", "padded"), ("bf16", "packed"), ("bf16", "recomputed"))
"""Of the published model, what is compared."""
WAYS: dict[str, dict[str, Any]] = {
    "padded": {},
    "packed": {"text": "packed"},
    "recomputed": {"model": {"checkpoint_activations": ["audio", "text"]}},
}
MEMORY = (
    "preset {preset} | attention {attention} | captions {way} | precision {precision} | micro-batch {micro_batch}"
    " | predicted, MiB {predicted_mib:,.1f} | allocated, MiB {measured_mib:,.1f} | error {error:+.2%}"
)


def make_run(preset: str, attention: str, precision: str, **clap: Any) -> RunSettings:
    """A run of one batch that is on the device already, with all dropout as in training."""
    micro_batch, tokens = SIZES[preset]
    lengths = {str(tokens): 1.0, str(tokens // 4): 3.0} if clap.get("text") == "packed" else None
    settings = ClapSettings.model_validate({
        "text_tokens": tokens,
        "cpu_kernels": "off",
        "data": {"source": "synthetic", "placement": "device", "num_batches": 1, "caption_lengths": lengths},
        **clap,
        "model": {"preset": preset, "attention": attention, **clap.get("model", {})},
    })  # fmt: skip
    config = {"train_micro_batch_size_per_gpu": micro_batch, "gradient_clipping": 0.0, "optimizer": OPTIMIZER}
    return RunSettings(Path("plan_validation"), settings, config | PRECISIONS[precision] | {"log_level": "error"})


def second_step(run: RunSettings) -> Callable[[], object]:
    """The engine's own step on one batch, once it has taken the first."""
    from clap_ds.engine.building import build_model
    from clap_ds.engine.engine import ClapEngine

    torch.manual_seed(0)
    device = torch.device("cpu")
    engine = ClapEngine(run, build_model(run, device), device)
    batches = build_batches(
        run.clap.data, model=run.clap.preset(), text_tokens=run.clap.text_tokens, micro_batch=run.micro_batch, rank=0,
        world_size=1, seed=0, device=device, pack_captions=run.clap.text == "packed",
    )  # fmt: skip
    step = partial(engine.step, batches, PhaseTimer(device, instrumented=False))
    step()
    return step


def cases() -> Iterator[tuple[str, str, str, str]]:
    """Preset, attention, way of captions and precision of each run that is compared."""
    for preset, attention, way, precision in itertools.product(SIZES, ("matmul", "sdpa"), WAYS, PRECISIONS):
        large = preset.startswith("htsat") and (attention == "sdpa" or (precision, way) not in LARGE)
        if not large and not (way == "packed" and attention == "sdpa"):
            yield preset, attention, way, precision


def predict(preset: str, attention: str, way: str, precision: str) -> tuple[RunSettings, dict[str, Any]]:
    """A run, and what a row of the table says of it before it is there."""
    run = make_run(preset, attention, precision, **WAYS[way])
    row = {"preset": preset, "attention": attention, "way": way, "precision": precision, "micro_batch": run.micro_batch}
    return run, row | {"predicted_mib": trace_step(run, run.micro_batch, cuda=False).recorded.peak_bytes / 2**20}


def main(argv: list[str] | None = None) -> None:
    parser = make_parser("plan_validation", __doc__)
    arguments = parser.parse_args(argv)
    os.environ["DS_ACCELERATOR"] = "cpu"
    torch.set_num_threads(1)
    predicted = [predict(*case) for case in cases()]  # before there is a group of ranks
    distributed.initialize(distributed.Ranks.from_environment(), compile_cpu_collective=False)
    rows = []
    for run, row in predicted:
        measured_mib = allocated_peak(partial(second_step, run)) / 2**20
        rows.append(row | {"measured_mib": measured_mib, "error": row["predicted_mib"] / measured_mib - 1})
    text = f"{device_name(torch.device('cpu'))}, one thread, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}."
    show(arguments.output, f"{text}\n\n{table(MEMORY, rows)}", rows)


if __name__ == "__main__":
    run_alone(main)
