"""Replace Triton kernels that don't run on this GPU by others, at last by torch's operations.

A kernel can fail for one size only, such as a stage whose windows need too many registers, so each
site of the model (`clap_ds.model.kernels.kernel_sites`) is tried by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from clap_ds.config.schema import ModelSettings
from clap_ds.distributed.collectives import rank
from clap_ds.distributed.watchdog import activity
from clap_ds.engine.compile import first_error
from clap_ds.model.clap import ClapModel
from clap_ds.model.contrastive import ContrastiveModel
from clap_ds.model.kernels import (
    LEAST_CAPABILITY,
    MAX_CAPTION_TOKENS,
    Kernels,
    KernelSite,
    kernel_sites,
    product_problem,
    substitute,
    text_attention_problem,
)
from clap_ds.run_records.schema import ChosenKernel

TRITON_KERNELS = ("triton", "triton_gelu")
"""Names of Triton's kernels, the fastest first."""


def replace_failing_kernels(
    settings: ModelSettings,
    model: ContrastiveModel,
    *,
    longest_caption: int = MAX_CAPTION_TOKENS,
    autocast: bool = False,
) -> dict[str, ChosenKernel]:
    """Try the Triton kernels that `auto` chose at each size, before anything is traced, and replace
    those that fail on any rank. A collective. Returns the kernels by part of a block whose setting
    is `auto`.

    Args:
        longest_caption: most tokens per caption.
        autocast: whether the forward pass computes in bf16 by autocast.
    """
    kernels: dict[str, ChosenKernel] = {}
    if not isinstance(model, ClapModel):
        return kernels
    capability = _find_capability(model.logit_scale.device)
    if capability is not None and capability < LEAST_CAPABILITY:
        for layer in model.text.blocks():
            layer.attention.self.has_varlen = False
    sites = kernel_sites(model)
    for part in Kernels._fields:
        if getattr(settings, f"{part}_impl") != "auto":
            continue
        # A setting that names a kernel is an order: its failure ends the run.
        part_sites = [site for site in sites if site.part == part]
        problems = _replace_at(part_sites, longest_caption, autocast=autocast)
        used = {site.modules[-1].kernel for site in part_sites}
        # Where the sites differ, the fastest is the one to report, beside why others don't have it.
        kernel = next(filter(used.__contains__, TRITON_KERNELS), None) or used.pop()
        problem = "; ".join(dict.fromkeys(problems.values())) or None
        kernels[part] = {"kernel": kernel, "problem": problem}
        if rank() == 0:
            message = f"kernel of clap.model.{part}_impl: {kernel}"
            if problem:
                message += f"; {', '.join(problems)} can't use Triton's: {problem}"
            print(message, flush=True)
    return kernels


def _replace_at(sites: list[KernelSite], longest_caption: int, *, autocast: bool) -> dict[str, str]:
    """Replace the kernels that fail, and return the problems by the sites' names."""
    problems: dict[str, str] = {}
    for site in sites:
        attempt = partial(_check_and_try, site, longest_caption, autocast=autocast)
        # Without Triton, the plan has torch's kernels already.
        while (kernel := site.modules[-1].kernel) in TRITON_KERNELS:
            with activity("trying kernels"):
                problem = first_error(attempt)
            if not problem:
                break
            # The first one is why the site hasn't the fastest.
            problems.setdefault(site.name, problem)
            for module in site.modules:
                module.kernel = substitute(site.part, kernel, site.tokens.device)
    return problems


def _check_and_try(site: KernelSite, longest_caption: int, *, autocast: bool) -> None:
    """Raise an error if a site's kernel doesn't suit the run or doesn't run."""
    problem = None
    capability = _find_capability(site.tokens.device)
    if site.part == "text_attention":
        head_dim = site.modules[-1].head_dim
        dtype = torch.bfloat16 if autocast else site.tokens.dtype
        problem = text_attention_problem(head_dim, longest_caption, dtype, capability)
    elif site.part == "mlp" and site.modules[-1].kernel == "triton":
        problem = product_problem(capability)
    if problem:
        raise ValueError(problem)
    _try(site.function, site.tokens, autocast=autocast)


def _find_capability(device: torch.device) -> tuple[int, int] | None:
    """Return a GPU's CUDA compute capability; None for a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def _try(function: Callable[[Tensor], Tensor], tokens: Tensor, *, autocast: bool) -> None:
    """Run a function forward and backward."""
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=autocast):
        output = function(tokens.requires_grad_())
    # The backward kernel is the larger one, so it may fail alone.
    torch.autograd.grad(output.sum(), tokens)
