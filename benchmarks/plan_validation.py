"""Command: how right a plan is, by everything that can be held against it without a GPU.

    python -m benchmarks.plan_validation [--only memory] [--output results/cpu/plan/memory.md]

Memory against what the CPU's allocator really holds in a step of the engine, by torch's profiler; and the published run, of
which it is known what fitted. Time is told by GPUs alone (`make gpu-check`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import allocated_peak, make_parser, show, table
from clap_ds.config.errors import run_alone
from clap_ds.config.settings import ClapSettings, RunSettings
from clap_ds.data.sources import build_batches
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
PUBLISHED = (
    "GPU {gpu} | micro-batch {micro_batch} | text tokens {text_tokens} | precision {precision}"
    " | predicted peak, GiB {peak_gib:.1f} | there are, GiB {device_gib:.1f} | fits {fits}"
)


def make_run(preset: str, attention: str, precision: str, micro_batch: int | None = None, **clap: Any) -> RunSettings:
    """A run of one batch that is on the device already, with all dropout as in training."""
    default, tokens = SIZES.get(preset, (0, 77))
    lengths = {str(tokens): 1.0, str(tokens // 4): 3.0} if clap.get("text") == "packed" else None
    settings = ClapSettings.model_validate({
        "text_tokens": tokens,
        "cpu_kernels": "off",
        "data": {"source": "synthetic", "placement": "device", "num_batches": 1, "caption_lengths": lengths},
        **clap,
        "model": {"preset": preset, "attention": attention, **clap.get("model", {})},
    })  # fmt: skip
    config = {
        "train_micro_batch_size_per_gpu": micro_batch or default,
        "gradient_clipping": 0.0,
        "optimizer": OPTIMIZER,
    }
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


def memory_cases() -> Iterator[dict[str, Any]]:
    """What is compared, with predictions."""
    from clap_ds.planning.step import trace_step

    cases = [(preset, attention, way, precision) for preset in SIZES for way in WAYS for attention in ("matmul", "sdpa")
             for precision in PRECISIONS]  # fmt: skip
    for preset, attention, way, precision in cases:
        large = preset.startswith("htsat")
        if (way == "packed" and attention == "sdpa") or (
            large and (attention == "sdpa" or (precision, way) not in LARGE)
        ):
            continue
        run = make_run(preset, attention, precision, **WAYS[way])
        predicted = trace_step(run, run.micro_batch, cuda=False).recorded.peak_bytes
        yield {"run": run, "preset": preset, "attention": attention, "way": way, "precision": precision,
               "micro_batch": run.micro_batch, "predicted_mib": predicted / 2**20}  # fmt: skip


def memory_rows(cases: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for case in cases:
        measured = allocated_peak(partial(second_step, case.pop("run"))) / 2**20
        yield {**case, "measured_mib": measured, "error": case["predicted_mib"] / measured - 1}


def published_cases() -> Iterator[dict[str, Any]]:
    """The published micro-batch on the published GPU, with the caption length that it must have had and the one it is counted
    with, by this engine in the published precision."""
    from clap_ds.flop_count.peaks import gpu_named
    from clap_ds.planning.memory import memory_parts
    from clap_ds.planning.step import trace_step

    gpu = gpu_named("gh200")
    for preset, micro_batch in (("htsat_tiny_roberta_base", 616), ("htsat_base_roberta_base", 416)):
        for tokens in (77, 512):
            run = make_run(preset, "matmul", "autocast", micro_batch, text_tokens=tokens)
            peak_gib = sum(memory_parts(trace_step(run, micro_batch, world_size=4), 4).values())
            yield {"preset": preset, "gpu": gpu.name, "micro_batch": micro_batch, "text_tokens": tokens,
                   "precision": run.precision, "peak_gib": peak_gib, "device_gib": gpu.memory_gib,
                   "fits": peak_gib <= gpu.memory_gib}  # fmt: skip


PARTS: dict[str, tuple[str, Callable[[], Any], Callable[[Any], Any]]] = {
    "memory": (MEMORY, memory_cases, memory_rows),
    "published": (PUBLISHED, published_cases, list),
}
"""Columns, predictions, and what is measured beside them."""


def main(argv: list[str] | None = None) -> None:
    parser = make_parser("plan_validation", __doc__)
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS), help="default: all")
    arguments = parser.parse_args(argv)
    os.environ["DS_ACCELERATOR"] = "cpu"
    torch.set_num_threads(1)
    predicted = {name: list(PARTS[name][1]()) for name in arguments.only}  # before there is a group of ranks
    distributed.initialize(distributed.Ranks.from_environment(), compile_cpu_collective=False)
    found: dict[str, Any] = {"processor": device_name(torch.device("cpu")), "torch": torch.__version__}
    found["date"] = time.strftime("%Y-%m-%d")
    text = [f"{found['processor']}, one thread, torch {found['torch']}, {found['date']}."]
    for name, cases in predicted.items():
        columns, _, measure = PARTS[name]
        found[name] = list(measure(cases))
        text += [f"## {name.capitalize()}", table(columns, found[name])]
    show(arguments.output, "\n\n".join(text), found)


if __name__ == "__main__":
    run_alone(main)
