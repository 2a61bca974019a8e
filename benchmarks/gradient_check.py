"""Compare every parameter's gradient, compiled and with Triton kernels as in a run, with eager
PyTorch.

    python -m benchmarks.gradient_check --deepspeed_config RUN [--clips 64] [--output FILE.md]

All sides use the same batches, without dropout, stochastic depth and SpecAugment. The reference is
the same model by torch's operations in eager fp32. A gradient is wrong if its error is more than
three times that of torch's operations in eager bf16, plus 1% of its norm. Both errors are medians
over the batches: a rounding that flips a ReLU changes one batch's error a lot.

Before, `dropout_check` checks compiled dropout by itself.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import make_parser, save, show, table
from benchmarks.dropout_check import check_dropout
from clap_ds.config.settings import RunSettings, load_run
from clap_ds.data.batch import Batch
from clap_ds.data.dataloader import build_batches
from clap_ds.distributed.init import Ranks
from clap_ds.distributed.process_group import initialize
from clap_ds.engine.compile import compile_towers, reason_of
from clap_ds.engine.factory import build_model
from clap_ds.engine.kernel_fallback import replace_failing_kernels
from clap_ds.model.contrastive import ContrastiveModel
from clap_ds.utils.errors import UserError, run_alone

PLAIN = {"attention_impl": "sdpa", "mlp_impl": "torch", "text_attention_impl": "torch"}
OFF = {"drop_path": 0.0, "text_dropout": 0.0, "spec_augment": False}
BATCHES = 3
FACTOR = 3.0
SLACK = 0.01
SHARPEN = 3.0
# Linears whose weights are multiplied: attention of a new model is so even that queries and keys
# have almost no gradient.
SHARPENED = ("qkv", "query", "key")
COLUMNS = (
    "parameter or property {name} | norm {norm:.2e} | eager, off by {eager:.2e} | compiled, off by {compiled:.2e}"
    " | share of the bound {share:.2f} | wrong {wrong}"
)


def gradients(model: ContrastiveModel, batch: Batch) -> dict[str, Tensor]:
    """Return each parameter's gradient in fp32, without the logit scale's, of a fixed sum of the
    features.

    The contrastive loss's gradient is a difference of clips' almost equal features, in which
    rounding errors are five times as large. Both are computed outside the compiled towers.
    """
    model.zero_grad(set_to_none=True)
    audio, text, *_ = model(*batch.model_inputs())
    # Fixed signs, so that features of all clips have large gradients.
    generator = torch.Generator().manual_seed(0)
    signs = torch.randn(2, audio.shape[1], generator=generator).sign().to(audio.device)
    # The features' gradients are these signs.
    (signs[0] * audio.float() + signs[1] * text.float()).sum().backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter is not model.logit_scale:
            gradient = parameter.grad
            # An unused parameter has none.
            gradients[name] = torch.zeros(()) if gradient is None else gradient.float()
    return gradients


def make_batches(run: RunSettings, device: torch.device, clips: int) -> list[Batch]:
    """Return `BATCHES` batches of different data."""
    options: Any = {
        "model": run.clap.preset(),
        "device": device,
        "context_length": run.clap.context_length,
        "micro_batch": clips,
    }
    batches = list[Batch]()
    for seed in range(BATCHES):
        with build_batches(run.clap.data, **options, rank=0, world_size=1, seed=seed) as source:
            batches.append(next(source))
    return batches


def make_model(run: RunSettings, device: torch.device, **changes: Any) -> ContrastiveModel:
    settings = run.clap.model.model_copy(update=changes)
    model = build_model(settings, run.clap.loss, device, run.clap.train.freeze)
    dtype = torch.bfloat16 if run.precision == "bf16" else torch.float32
    return model.to(device, dtype).train()


def compare(
    run: RunSettings, device: torch.device, clips: int, backend: Any = "inductor"
) -> Iterator[list[dict[str, Any]]]:
    """Yield after each batch a row per parameter: its gradient's norm in fp32, and errors of the
    eager and compiled gradients relative to it. These are medians of the batches so far."""
    batches = make_batches(run, device, clips)
    run.clap = run.clap.model_copy(update={"model": run.clap.model.model_copy(update=OFF)})
    torch.manual_seed(0)
    model = make_model(run, device)
    # Scale the weights before they are copied to the other models.
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and name.endswith(SHARPENED):
                module.weight.mul_(SHARPEN)
    eager_model = make_model(run, device, **PLAIN)
    eager_model.load_state_dict(model.state_dict())
    # Of the same weights, with 24 bits in place of 8.
    reference_model = copy.deepcopy(eager_model).float()
    if device.type == "cuda":
        replace_failing_kernels(run.clap.model, model)
    # What `compile_towers` needs of an engine.
    engine = SimpleNamespace(module=model, torch_autocast_enabled=lambda: False)
    compilation = compile_towers(engine, batches[0], "towers", cached=False, backend=backend)
    problems = {part: problem for part, problem in compilation["compiled"].items() if problem}
    if problems:
        raise UserError(f"compilation failed: {problems}")
    norms = defaultdict[str, list[float]](list)
    eager_errors = defaultdict[str, list[float]](list)
    compiled_errors = defaultdict[str, list[float]](list)
    for batch in batches:
        eager = gradients(eager_model, batch)
        reference = gradients(reference_model, batch)
        compiled = gradients(model, batch)
        # Smaller norms are rounding errors.
        floor = 1e-4 * max(float(gradient.norm()) for gradient in reference.values())
        for name, gradient in reference.items():
            norm = float(gradient.norm())
            scale = max(norm, floor)
            norms[name].append(norm)
            eager_errors[name].append(float((eager[name] - gradient).norm()) / scale)
            compiled_errors[name].append(float((compiled[name] - gradient).norm()) / scale)
        rows = list[dict[str, Any]]()
        for name, values in norms.items():
            eager_error = median(eager_errors[name])
            compiled_error = median(compiled_errors[name])
            row = {"name": name, "norm": median(values), "eager": eager_error}
            # Above 1, it exceeds its bound.
            share = compiled_error / (FACTOR * eager_error + SLACK)
            rows.append({**row, "compiled": compiled_error, "share": share, "wrong": share > 1})
        # The worst first.
        yield sorted(rows, key=lambda row: -row["share"])


def main(argv: list[str] | None = None) -> None:
    parser = make_parser(__doc__)
    add = parser.add_argument
    config = "the run's JSON"
    add("--deepspeed_config", type=Path, required=True, metavar="RUN", help=config)
    add("--clips", type=int, default=64, help="batch size in clips (default: 64)")
    options = parser.parse_args(argv)
    device = initialize(Ranks.from_environment())
    # TF32 would be no reference.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    dropout_rows = list[dict[str, Any]]()
    try:
        for row in check_dropout(device):
            dropout_rows.append(row)
            print(row["name"], "wrong" if row["wrong"] else "right", sep=": ", flush=True)
            # The command may be ended at any time.
            save(options.output, table(COLUMNS, dropout_rows), dropout_rows)
    except Exception as error:
        # The gradients are still worth checking.
        name = f"the dropout check failed: {reason_of(error)}"
        dropout_rows.append({"name": name, "wrong": True})
    for gradient_rows in compare(load_run(options.deepspeed_config, 1), device, options.clips):
        rows = [*dropout_rows, *gradient_rows]
        wrong = [row["name"] for row in rows if row["wrong"]]
        counts = f"{len(gradient_rows)} gradients and {len(dropout_rows)} properties of dropout"
        # The table has all properties, and the gradients closest to their bounds.
        lines = table(COLUMNS, rows[: len(dropout_rows) + 12])
        show(options.output, f"{counts}, {len(wrong)} wrong\n\n{lines}", rows)
    if wrong:
        raise UserError(f"{len(wrong)} gradients or properties are wrong: {', '.join(wrong[:5])}")


if __name__ == "__main__":
    run_alone(main)
