"""Compare every parameter's gradient, compiled and with Triton kernels as in a run, with eager PyTorch.

    python -m benchmarks.gradient_check --deepspeed_config RUN [--clips 64] [--output FILE.md]

All sides use one batch, without dropout, stochastic depth and SpecAugment. The reference is the same model by torch's
operations in eager fp32. A gradient is wrong if its error is more than twice that of torch's operations in eager bf16, plus 1%
of its norm.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.baselines import softmax_loss
from benchmarks.common import make_parser, show, table
from clap_ds.config.errors import UserError, run_alone
from clap_ds.config.settings import RunSettings, load_run
from clap_ds.data.batch import Batch
from clap_ds.data.dataloader import build_batches
from clap_ds.distributed.init import Ranks, initialize
from clap_ds.engine.compile import compile_towers
from clap_ds.engine.factory import build_model
from clap_ds.engine.kernel_fallback import fall_back
from clap_ds.model.contrastive import ContrastiveModel

PLAIN = {"attention_impl": "sdpa", "mlp_impl": "torch", "text_attention_impl": "torch"}
OFF = {"drop_path": 0.0, "text_dropout": 0.0, "spec_augment": False}
FACTOR, SLACK = 2.0, 0.01
SHARPEN = 3.0
"""Factor on the weights of linears: attention of a new model is so even that queries and keys have almost no gradient."""
COLUMNS = (
    "parameter {name} | norm {norm:.2e} | eager, off by {eager:.2e} | compiled, off by {compiled:.2e} | wrong {wrong}"
)


def gradients(model: ContrastiveModel, batch: Batch) -> dict[str, Tensor]:
    """Return each parameter's gradient in fp32, without the logit scale's, which is one number of the loss."""
    model.zero_grad(set_to_none=True)
    softmax_loss(*model(*batch.model_inputs())).backward()
    trained = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    named = {name: each.grad for name, each in trained if each is not model.logit_scale}
    return {name: torch.zeros(()) if grad is None else grad.float() for name, grad in named.items()}


def compare(run: RunSettings, device: torch.device, clips: int, backend: Any = "inductor") -> list[dict[str, Any]]:
    """Return a row per parameter: its gradient's norm in fp32, and relative errors of the eager and compiled gradients."""
    of_run: Any = {"model": run.clap.preset(), "device": device, "context_length": run.clap.context_length}
    with build_batches(run.clap.data, **of_run, micro_batch=clips, rank=0, world_size=1, seed=0) as batches:
        batch = next(batches)
    run.clap = run.clap.model_copy(update={"model": run.clap.model.model_copy(update=OFF)})
    dtype = torch.bfloat16 if run.precision == "bf16" else torch.float32

    def build(**kernels: str) -> ContrastiveModel:
        settings = run.clap.model.model_copy(update=kernels)
        return build_model(settings, run.clap.loss, device, run.clap.train.freeze).to(device, dtype).train()

    torch.manual_seed(0)
    model, plain = build(), build(**PLAIN)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight.mul_(SHARPEN)
    plain.load_state_dict(model.state_dict())
    eager, expected = gradients(plain, batch), gradients(plain.float(), batch)
    del plain
    if device.type == "cuda":
        fall_back(run.clap.model, model)
    engine = SimpleNamespace(module=model, torch_autocast_enabled=lambda: False)
    problems = compile_towers(engine, batch, "towers", cached=False, backend=backend)["compiled"]
    if failed := {part: problem for part, problem in problems.items() if problem}:
        raise UserError(f"compilation failed: {failed}")
    compiled, rows = gradients(model, batch), list[dict[str, Any]]()
    typical = {name: float(each.norm()) for name, each in expected.items()}
    floor = 1e-4 * max(typical.values())  # smaller gradients are rounding errors, such as a key bias's

    def errors(found: dict[str, Tensor]) -> dict[str, float]:
        return {name: float((found[name] - each).norm()) / max(typical[name], floor) for name, each in expected.items()}

    off, off_compiled = errors(eager), errors(compiled)
    for name, norm in typical.items():
        row = {"name": name, "norm": norm, "eager": off[name], "compiled": off_compiled[name]}
        rows.append({**row, "wrong": off_compiled[name] > FACTOR * off[name] + SLACK})
    return sorted(rows, key=lambda row: -(row["compiled"] - FACTOR * row["eager"]))


def main(argv: list[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--deepspeed_config", type=Path, required=True, metavar="RUN", help="the run's JSON")
    parser.add_argument("--clips", type=int, default=64, help="batch size in clips (default: 64)")
    options = parser.parse_args(argv)
    device = initialize(Ranks.from_environment())
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    rows = compare(load_run(options.deepspeed_config, 1), device, options.clips)
    wrong = [row["name"] for row in rows if row["wrong"]]
    show(options.output, f"{len(rows)} gradients, {len(wrong)} wrong\n\n{table(COLUMNS, rows[:12])}", rows)
    if wrong:
        raise UserError(f"{len(wrong)} gradients are wrong: {', '.join(wrong[:5])}")


if __name__ == "__main__":
    run_alone(main)
