"""Make a run what it would be on the planned GPU. Only here a plan asks what a device supports, and
it never asks the planning host's."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.utils._triton import has_triton_package

from clap_ds.config.settings import RunSettings
from clap_ds.flop_count.device_specs import Gpu
from clap_ds.model.kernels import LEAST_CAPABILITY, text_attention_problem, torch_kernels
from clap_ds.utils.errors import UserError

# Of the products in a step, by precision.
DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "torch_autocast_bfloat16": torch.bfloat16,
    "fp32": torch.float32,
}


def resolve_for_gpu(run: RunSettings, gpu: Gpu) -> RunSettings:
    """Return the run with the kernels and the compilation that it would have on a GPU.

    Raises UserError for a precision or kernel that the GPU lacks.
    """
    clap = run.clap
    is_older = gpu.capability < LEAST_CAPABILITY
    kernels = _choose_older(run, gpu) if is_older else _choose_text_attention(run, gpu)
    # Inductor generates Triton kernels. Towers that can't be compiled run as they are.
    compile_setting = "off" if is_older else clap.compile
    changes = {"model": clap.model.model_copy(update=kernels), "compile": compile_setting}
    return replace(run, clap=clap.model_copy(update=changes))


def _choose_older(run: RunSettings, gpu: Gpu) -> dict[str, str]:
    """Return torch's kernels for settings that are `auto`, on a GPU that Triton doesn't support."""
    if DTYPES[run.precision] == torch.bfloat16:
        section = run.precision.removesuffix("_bfloat16")
        raise UserError(
            f"{run.path}: {section}.enabled: {gpu.device_name} has no bf16; use fp16.enabled,"
            " as in ds_configs/htsat_tiny_fp16.json"
        )
    kernels = {}
    for part, kernel in torch_kernels(torch.device("cuda"))._asdict().items():
        field = f"{part}_impl"
        setting = getattr(run.clap.model, field)
        # A setting that names a kernel is an order: its failure ends the run.
        if setting == "triton":
            raise UserError(
                f"{run.path}: clap.model.{field}: {gpu.device_name} can't run 'triton'; use 'auto'"
            )
        kernels[field] = kernel if setting == "auto" else setting
    return kernels


def _choose_text_attention(run: RunSettings, gpu: Gpu) -> dict[str, str]:
    """Return torch's text attention if it is `auto` and Triton's doesn't suit the run."""
    clap = run.clap
    text = clap.preset().text
    if clap.model.text_attention_impl != "auto":
        return {}
    head_dim = text.hidden_size // text.num_heads
    dtype = DTYPES[run.precision]
    problem = text_attention_problem(head_dim, clap.context_length, dtype, gpu.capability)
    return {"text_attention_impl": "torch"} if problem else {}


def describe_triton(gpu: Gpu) -> str:
    """Return why a plan has torch's kernels where a run's `auto` may not, or an empty string."""
    if gpu.capability < LEAST_CAPABILITY:
        return f"Triton doesn't support {gpu.device_name}: torch's kernels, not compiled"
    if not has_triton_package():
        return (
            "Triton isn't installed here, so torch's kernels are planned; a GPU's torch brings it"
        )
    return ""
