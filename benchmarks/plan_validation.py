"""Command: how right a plan is, by everything that can be held against it without a GPU.

    python -m benchmarks.plan_validation [--only memory] [--output results/cpu/plan/plan.md]

FLOPs against the closed form; memory against what the CPU's allocator really holds in a step of the engine, by torch's
profiler; time against the same step's, with rates of this processor measured beside it, in CPU seconds of one thread so that
other programs matter little; and the published run, of which it is known what fitted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.common import allocated_peak, make_parser, show, table
from clap_ds.config.errors import run_alone
from clap_ds.config.settings import ClapSettings, RunSettings
from clap_ds.data.sources import build_batches
from clap_ds.dist import distributed
from clap_ds.flop_count.analytic import TextLengths, forward_components
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
SHAPES = ((16384, 96, 384), (4096, 192, 768), (1024, 384, 1536), (1232, 768, 768), (1232, 768, 3072))
"""Rows, inputs and outputs of linears in HTSAT-tiny and RoBERTa."""
TIMED = [("htsat_tiny_roberta_base", "matmul", precision, 4) for precision in ("bf16", "autocast")] + [
    ("demo", attention, "bf16", 16) for attention in ("matmul", "sdpa")
]
"""Preset, attention, precision and micro-batch."""
WAYS: dict[str, dict[str, Any]] = {
    "padded": {},
    "packed": {"text": "packed"},
    "recomputed": {"model": {"checkpoint_activations": ["audio", "text"]}},
}
MEMORY = (
    "preset {preset} | attention {attention} | captions {way} | precision {precision} | micro-batch {micro_batch}"
    " | predicted, MiB {predicted_mib:,.1f} | allocated, MiB {measured_mib:,.1f} | error {error:+.2%}"
)
TIME = (
    "preset {preset} | attention {attention} | precision {precision} | micro-batch {micro_batch}"
    " | predicted, s {predicted_s:.3f} | measured, s {measured_s:.3f} | error {error:+.1%}"
)
FLOPS = (
    "preset {preset} | attention {attention} | forward, GFLOPs {forward:.6f} | closed form {closed:.6f}"
    " | difference {error:.1e}"
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


def make_step(run: RunSettings) -> tuple[Callable[[], None], Any]:
    """The engine's own step on one batch, and the batch."""
    from clap_ds.engine.engine import ClapEngine
    from clap_ds.engine.session import build_model

    torch.manual_seed(0)
    device = torch.device("cpu")
    engine = ClapEngine(run, build_model(run, device), device)
    batches = build_batches(
        run.clap.data, model=run.clap.preset(), text_tokens=run.clap.text_tokens, micro_batch=run.micro_batch, rank=0,
        world_size=1, seed=0, device=device, pack_captions=run.clap.text == "packed",
    )  # fmt: skip
    timer = PhaseTimer(device, instrumented=False)
    return lambda: void(engine.step(batches, timer)), next(batches)


def void(_: object) -> None:
    """Takes what a function returns."""


def second_step(run: RunSettings) -> Callable[[], None]:
    step, _ = make_step(run)
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


def cpu_seconds(action: Callable[[], object], least_s: float = 0.05) -> float:
    """Of one call, once warm: the median of three rounds, by this process's own time."""
    action()
    rounds = []
    for _ in range(3):
        number, started_s = 0, time.process_time()
        while time.process_time() - started_s < least_s or not number:
            action()
            number += 1
        rounds.append((time.process_time() - started_s) / number)
    return median(rounds)


def own_actions() -> dict[str, Callable[[], object]]:
    """The operations beside linears that take most of a step on a CPU, by name, at sizes as the models have them."""
    aten = torch.ops.aten
    x, bias = torch.randn(4096, 768).bfloat16(), torch.randn(768).bfloat16()
    q, image = torch.randn(2048, 64, 24).bfloat16(), torch.randn(8, 1, 256, 256).bfloat16()
    filters, frames = torch.randn(96, 1, 4, 4).bfloat16(), torch.randn(4096, 1024)
    scores, flat = torch.randn(2048, 64, 64).bfloat16(), torch.randn(4_000_000)
    d_patches, ids = torch.randn(8, 96, 64, 64).bfloat16(), torch.randint(50_000, (4096,))
    normed, softmax, steps = (x, [768], bias, bias, 1e-5), scores.softmax(-1), [torch.ones(())]
    _, mean, inverse = aten.native_layer_norm(*normed)
    convolved = (image, filters, None, [4, 4], [0, 0], [1, 1], False, [0, 0], 1)
    calls: list[tuple[Any, ...]] = [
        (aten.bmm, q, q.transpose(1, 2)),
        (aten.convolution, *convolved),
        (aten.convolution_backward, d_patches, *convolved, [True, True, False]),
        (aten._fft_r2c, frames, [1], 0, True),
        (aten.gelu, x),
        (aten.gelu_backward, x, x),
        (aten.native_layer_norm, *normed),
        (aten.native_layer_norm_backward, x, x, [768], mean, inverse, bias, bias, [True, True, True]),
        (aten._softmax, scores, -1, False),
        (aten._softmax_backward_data, scores, softmax, -1, torch.bfloat16),
        (aten.sum, x, [0]),
        (aten.embedding_dense_backward, x, ids, 50_265, 1, False),
        (aten.log10, flat),
    ]
    adam: dict[str, Any] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8}
    adam |= {"amsgrad": False, "maximize": False, "grad_scale": None, "found_inf": None}
    return {
        **{str(function): partial(function, *arguments) for function, *arguments in calls},
        "aten.bernoulli_": lambda: x.bernoulli_(0.9),
        "aten.copy_": lambda: scores.copy_(softmax.transpose(0, 1).contiguous().transpose(0, 1)),
        "aten._fused_adamw_": lambda: torch._fused_adamw_([flat], [flat], [flat], [flat.abs()], [], steps, **adam),
    }  # fmt: skip


def measured_rates() -> Any:
    """`Rates` of this processor: products by dtype, and what `own_actions` reach."""
    from clap_ds.planning.roofline import Rates
    from clap_ds.planning.trace import trace

    def per_second(name: str, *actions: Callable[[], object]) -> tuple[str, float]:
        """FLOPs (bytes where there are none) of operations of that name, as the tracer counts them, over the actions' time."""
        operations = []
        for action in actions:
            with trace() as recorded:
                action()
            operations += [each for each in recorded.operations if name in ("", each.name)]
        what = "flops" if any(each.flops for each in operations) else "bytes_moved"
        return what, sum(getattr(each, what) for each in operations) / sum(map(cpu_seconds, actions))

    flops = {}
    for dtype in (torch.bfloat16, torch.float32):
        actions: list[Callable[[], object]] = []
        for rows, inputs, outputs in SHAPES:
            sizes = (rows, inputs), (outputs, inputs), (rows, outputs)
            x, weight, d_y = (torch.randn(size).to(dtype) for size in sizes)
            actions += [partial(F.linear, x, weight), partial(torch.mm, d_y, weight), partial(torch.mm, d_y.T, x)]
        flops[dtype] = per_second("", *actions)[1]
    x = torch.randn(4096, 768).bfloat16()
    own: dict[str, dict[str, float]] = {"flops": {}, "bytes_moved": {}}
    for name, action in own_actions().items():
        what, rate = per_second(name, action)
        own[what][name] = rate
    return Rates(flops, per_second("aten.add", lambda: x + x)[1], 0.0, own["flops"], own["bytes_moved"])


def time_cases() -> Iterator[dict[str, Any]]:
    from clap_ds.planning.step import trace_step

    for preset, attention, precision, micro_batch in TIMED:
        runs = [make_run(preset, attention, precision, micro_batch), make_run("micro", attention, precision, 2)]
        steps = [trace_step(run, run.micro_batch, cuda=False) for run in runs]
        yield {"runs": runs, "steps": steps, "preset": preset, "attention": attention, "precision": precision,
               "micro_batch": micro_batch}  # fmt: skip


def time_rows(cases: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """What an operation takes beyond its work, Python's and the engine's time, is that of a step that has next to no work."""
    from clap_ds.planning.roofline import Rates, seconds_by_part

    def work_s(step: Any, rates: Rates) -> float:
        return seconds_by_part(((each, step.times(each)) for each in step.recorded.operations), rates)["step"]

    for case in cases:
        (large, small), runs = case.pop("steps"), case.pop("runs")
        take_step, take_small = (make_step(run)[0] for run in runs)
        rates, small_s, measured_s = measured_rates(), cpu_seconds(take_small), cpu_seconds(take_step)
        num_operations = [step.recorded.total("launches") for step in (large, small)]
        overhead_s = max(0.0, small_s - work_s(small, rates)) / num_operations[1]
        predicted_s = work_s(large, rates) + overhead_s * num_operations[0]
        yield {**case, "predicted_s": predicted_s, "measured_s": measured_s, "error": predicted_s / measured_s - 1}


def flops_cases() -> Iterator[dict[str, Any]]:
    """A forward pass on a GPU; without the loss, whose products depend on the number of ranks."""
    from clap_ds.planning.step import trace_step

    for preset in SIZES:
        for attention in ("matmul", "auto", "triton"):
            run = make_run(preset, attention, "bf16")
            recorded = trace_step(run, run.micro_batch).recorded
            found = (
                sum(recorded.total("flops", part=part, backward=False) for part in ("audio", "text")) / run.micro_batch
            )
            lengths = TextLengths.fixed(run.clap.text_tokens)
            closed = forward_components(run.clap.preset(), lengths, "model")["forward"]
            yield {"preset": preset, "attention": attention, "forward": found / 1e9, "closed": closed / 1e9,
                   "error": found / closed - 1}  # fmt: skip


def published_cases() -> Iterator[dict[str, Any]]:
    """The published micro-batch on the published GPU, with the caption length that it must have had and the one it is counted
    with, by this engine in the published precision."""
    from clap_ds.planning.hardware import gpu_named
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
    "flops": (FLOPS, flops_cases, list),
    "memory": (MEMORY, memory_cases, memory_rows),
    "time": (TIME, time_cases, time_rows),
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
