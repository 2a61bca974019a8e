"""Tries kernels of one part of the model on one device: whether they are right, and how long they take. Run as a process of its
own, since a fault on CUDA ends the context it happens in, and a kernel may hang.

A site is what kernels are compiled for and tried on: one window attention or MLP, by its sizes. Each kernel is compared, at
the run's own micro-batch, with plain products in fp32 on the first and last clips: the gradient that comes in is 0 for the
others, so that those of weights are of these clips, too, and those of other clips are 0. Times are of the kernel by itself,
forward and backward, not compiled together with its neighbours. Who asks, and what comes of it, is left to `kernels`.

    python -m clap_ds.engine.kernel_trials '{"device": "cuda:0", "dtype": "bfloat16", "clips": 616, "parent": 4711}'

says `{}` once it is ready, reads a list of questions (`{"site": …, "kernel": …, "what": "check" or "time"}`) from its standard
input and answers one after the other by a line of JSON: `{}` for right, `{"seconds": …}`, or `{"problem": …}` with `passing`
where another try may end otherwise. It ends when all are answered, after a fault of its CUDA context, and with its parent.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.func import functional_call
from torch.utils._triton import has_triton_package

from clap_ds.dist.accelerator import set_up_cuda
from clap_ds.model.kernel_choice import KernelChoice
from clap_ds.model.swin import Mlp
from clap_ds.model.window_attention import attend_windows
from clap_ds.model.windows import shifted_window_mask
from clap_ds.record.clock import StepClock

TOLERANCE = {torch.float32: 2e-5, torch.float16: 0.004, torch.bfloat16: 0.03}
"""Of the largest value, as in the kernels' tests."""
REPEATS = 5
LEAD_CYCLES = 2_000_000
"""Of the GPU's clock, about 1 ms, which it waits before what is timed, so that the host is ahead of it as in training."""
PASSING = torch.OutOfMemoryError | MemoryError | OSError | subprocess.SubprocessError
PR_SET_PDEATHSIG = 1
"""Of Linux's `prctl`."""

Operation = Callable[..., Tensor]
"""A kernel and a site's tensors → its output."""
Measure = Callable[[Callable[[], object]], float]
"""Something to do → seconds it took."""


@dataclass(frozen=True)
class AttentionSite:
    """Window attention on a square token grid.

    Attributes:
        grid: side of the grid, in tokens.
        window: side of a window.
        shift: how far the grid is moved under the windows.
        dim: channels.
    """

    grid: int
    window: int
    shift: int
    heads: int
    dim: int

    reference: ClassVar = KernelChoice("matmul")
    compared: ClassVar = (("output",), ("q", "k", "v"), ("bias",))
    """Names of what `results` gives; where there are several, they lie side by side in its last dimension."""

    def __str__(self) -> str:
        shifted = f", shift {self.shift}" if self.shift else ""
        return f"attention {self.grid}×{self.grid}×{self.dim}, {self.heads} heads, {self.window}×{self.window} windows{shifted}"

    def candidates(self) -> list[KernelChoice]:
        """What can be tried here, the one to take untried first."""
        if not has_triton_package():
            return [KernelChoice("sdpa")]
        from clap_ds.model.window_attention_triton import LAUNCHES

        return [KernelChoice("sdpa"), *LAUNCHES]

    def draw(self, clips: int, random: Callable[..., Tensor]) -> list[Tensor]:
        """qkv (B, H, W, 3·C) and bias (A, N, N)."""
        tokens = self.window**2
        return [random(clips, self.grid, self.grid, 3 * self.dim), random(self.heads, tokens, tokens)]

    def operation(self, device: torch.device) -> Operation:
        mask = shifted_window_mask(self.grid, self.window, self.shift).to(device) if self.shift else None
        return lambda kernel, qkv, bias: attend_windows(qkv, bias, mask, self.window, self.shift, kernel)


@dataclass(frozen=True)
class MlpSite:
    """A block's MLP on the tokens of a square grid."""

    grid: int
    dim: int
    ratio: int

    reference: ClassVar = KernelChoice("torch")
    compared: ClassVar = (("output",), ("tokens",), ("weight 1",), ("bias 1",), ("weight 2",), ("bias 2",))

    def __str__(self) -> str:
        return f"MLP {self.grid}×{self.grid}×{self.dim}, ratio {self.ratio}"

    def candidates(self) -> list[KernelChoice]:
        """As of `AttentionSite`."""
        if has_triton_package():
            from clap_ds.model.mlp_triton import LAUNCHES, supports

            if supports(self.dim, self.ratio * self.dim):
                return [KernelChoice("torch"), *LAUNCHES]
        return [KernelChoice("torch")]

    def draw(self, clips: int, random: Callable[..., Tensor]) -> list[Tensor]:
        """Tokens (B, H, W, C), then weights and biases, which keep the values' size."""
        dim, hidden = self.dim, self.ratio * self.dim
        first, second = random(hidden, dim) * dim**-0.5, random(dim, hidden) * hidden**-0.5
        return [random(clips, self.grid, self.grid, dim), first, random(hidden), second, random(dim)]

    def operation(self, device: torch.device) -> Operation:
        mlp = Mlp(self.dim, self.ratio).to("meta")
        names = [name for name, _ in mlp.named_parameters()]

        def run(kernel: KernelChoice, tokens: Tensor, *parameters: Tensor) -> Tensor:
            mlp.kernel = kernel
            output: Tensor = functional_call(mlp, dict(zip(names, parameters, strict=True)), tokens)
            return output

        return run


Site = AttentionSite | MlpSite


def to_json(site: Site) -> dict[str, Any]:
    return {"type": type(site).__name__, **asdict(site)}


def from_json(content: dict[str, Any]) -> Site:
    types: dict[str, type[Site]] = {each.__name__: each for each in (AttentionSite, MlpSite)}
    return types[content["type"]](**{name: size for name, size in content.items() if name != "type"})


def results(operation: Operation, kernel: KernelChoice, leaves: list[Tensor], probe: Tensor) -> list[Tensor]:
    """Output, and gradients of the leaves where the output's is `probe`."""
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    output = operation(kernel, *leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, probe)]


def check(site: Site, kernel: KernelChoice, clips: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """What a kernel gets wrong, None where it gets all right within `TOLERANCE`; raises what the kernel does."""
    leaves, probe = _draw(site, clips, dtype, device)
    few = torch.tensor(sorted({0, min(1, clips - 1), max(0, clips - 2), clips - 1}), device=device)
    only_few = torch.zeros_like(probe).index_copy_(0, few, probe[few])
    got = results(site.operation(device), kernel, leaves, only_few)
    in_fp32 = [leaves[0][few].float(), *(leaf.float() for leaf in leaves[1:])]
    expected = results(site.operation(device), site.reference, in_fp32, probe[few].float())
    of_clips = {0, 1}  # the output and the gradient of what comes in; others are of weights
    for number, (names, ours, theirs) in enumerate(zip(site.compared, got, expected, strict=True)):
        ours = ours[few] if number in of_clips else ours
        for name, x, y in zip(names, ours.chunk(len(names), -1), theirs.chunk(len(names), -1), strict=True):
            error = float((x.float() - y).abs().max() / y.abs().max())
            if not error < TOLERANCE[dtype]:  # NaN, too
                what = name if number == 0 else f"gradient of {name}"
                return f"its {what} is off by {error:.2g} of the largest value"
    if got[1].index_fill_(0, few, 0).any():
        return "its gradients reach other clips"
    return None


def seconds(
    site: Site, kernel: KernelChoice, clips: int, dtype: torch.dtype, device: torch.device, measure: Measure
) -> float:
    """Of a forward and backward pass, the median of `REPEATS` after one that isn't counted."""
    leaves, probe = _draw(site, clips, dtype, device)
    operation = site.operation(device)
    times = [measure(lambda: results(operation, kernel, leaves, probe)) for _ in range(1 + REPEATS)]
    return statistics.median(times[1:])


def _draw(site: Site, clips: int, dtype: torch.dtype, device: torch.device) -> tuple[list[Tensor], Tensor]:
    """A site's tensors and a gradient of its output, always the same."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype, device=device)

    return site.draw(clips, random), random(clips, site.grid, site.grid, site.dim)


def stopwatch(device: torch.device) -> Measure:
    """Times by the device's own clock."""
    clock = StepClock(device)

    def measure(do: Callable[[], object]) -> float:
        clock.start()
        if device.type == "cuda":
            torch.cuda._sleep(LEAD_CYCLES)
        clock.mark()
        do()
        clock.mark()
        return clock.stop()[1][-1]

    return measure


def answer(
    question: dict[str, Any], clips: int, dtype: torch.dtype, device: torch.device, measure: Measure
) -> dict[str, Any]:
    """To one question, as the module says; whatever goes wrong is an answer."""
    try:
        site = from_json(question["site"])
        kernel = {str(each): each for each in site.candidates()}[question["kernel"]]
        if question["what"] == "time":
            return {"seconds": seconds(site, kernel, clips, dtype, device, measure)}
        problem = check(site, kernel, clips, dtype, device)
        return {} if problem is None else {"problem": problem}
    except Exception as error:  # of whatever type a compiler or a driver has
        reason = first_line(error)
        # CUDA and Triton say it in words; what Triton starts or opens, such as a C compiler, may be there another time.
        is_passing = isinstance(error, PASSING) or "out of memory" in reason or "C compiler" in reason
        return {"problem": reason, "passing": is_passing}


def first_line(error: Exception) -> str:
    """The others of CUDA's say how to debug it."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def main(argv: list[str]) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print isn't an answer
    setup = json.loads(argv[1])
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != setup["parent"]:
        sys.exit("its parent has ended")
    device, dtype, clips = torch.device(setup["device"]), getattr(torch, setup["dtype"]), setup["clips"]
    if device.type == "cuda":
        set_up_cuda()  # as the ranks are
        try:
            torch.cuda.set_device(device)
            torch.cuda.synchronize()
        except Exception as error:  # one that a GPU in exclusive compute mode refuses, such as this one beside its rank
            sys.exit(first_line(error))
    print("{}", file=answers)  # ready
    for question in json.loads(sys.stdin.read() or "[]"):
        found = answer(question, clips, dtype, device, stopwatch(device))
        print(json.dumps(found), file=answers)
        if device.type == "cuda" and "problem" in found:
            try:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            except Exception:  # nothing runs in this process any more
                break
    os._exit(0)  # what a fault has left can't hold it up


if __name__ == "__main__":
    main(sys.argv)
