"""Record the operations of PyTorch code without executing them: FLOPs, bytes moved, live memory.

    with FakeTensorMode(), Recorded(audio=[model.audio]) as recorded:
        run()
    sum(each.flops for each in recorded.operations if each.part == "audio");
    recorded.at_peak.total()

Under `FakeTensorMode` nothing is computed or allocated, and values that the host reads are 0. A
storage lives until its last tensor is deleted. FLOPs follow `torch.utils.flop_counter`'s formulas,
and FFTs are added here.
"""

from __future__ import annotations

import bisect
import math
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from clap_ds.flop_count.analytic import fft_flops

TOWERS = ("audio", "text")
_OVERWRITES = ("aten.copy_", "aten.fill_", "aten.zero_")  # don't read what they overwrite
_NO_KERNEL = (
    "aten._unsafe_view",
    "aten.empty",
    "aten.new_empty",
)  # prefixes of operations that only make tensors


class Operation(NamedTuple):
    """Describe a dispatched operation."""

    name: str
    # of the traced code; in the backward pass (including recomputation), the part that is
    # differentiated
    part: str
    backward: bool
    flops: int
    bytes_moved: int  # bytes of distinct tensors read and written; 0 if nothing is launched
    dtype: torch.dtype | None = None  # of the first floating-point input or result
    shapes: tuple[
        tuple[int, ...], ...
    ] = ()  # of tensor arguments in order, like torch.profiler's without empty ones


class Recorded(TorchDispatchMode):
    """Record dispatched operations except collectives in order, the bytes of live storages, and
    their peak, also by part. Keywords name parts: modules whose forward and backward passes belong
    to them."""

    def __init__(self, **parts: Iterable[nn.Module]) -> None:
        super().__init__()
        outer = list[str]()
        for name, modules in parts.items():
            for each in modules:
                each.register_forward_pre_hook(
                    lambda *_, name=name: outer.append(self.enter(name)), prepend=True
                )
                each.register_forward_hook(
                    lambda *_: self.enter(outer.pop()) and None, always_call=True
                )
        self.operations: list[Operation] = []
        self.at_peak = Counter[str]()
        self._live = Counter[str]()
        self._storages: dict[int, tuple[str, int, Any]] = {}
        self._entered = [(0, "other")]

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Assign operations dispatched within, and their backward pass, to this part."""
        before = self.enter(name)
        yield
        self.enter(before)

    def enter(self, name: str) -> str:
        self._entered.append((torch.autograd._get_sequence_nr(), name))
        return self._entered[-2][1]

    def hold(self, tree: Any, part: str) -> None:
        """Count tensors of any containers as live and assign them to a part, even if they were
        counted before."""
        for tensor in _tensors(tree):
            storage = tensor.untyped_storage()
            self._forget(key := storage._cdata)
            self._storages[key] = (
                part,
                storage.nbytes(),
                weakref.ref(storage, partial(self._forget, key)),
            )
            self._live[part] += storage.nbytes()
            self.at_peak = max(self.at_peak, self._live.copy(), key=Counter.total)

    def restart(self) -> None:
        """Clear the operations and reset the peak to the live memory."""
        self.operations.clear()
        self.at_peak = self._live.copy()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func._overloadpacket)
        packet = func._overloadpacket
        if name == "aten._local_scalar_dense" and isinstance(args[0], FakeTensor):
            return False if args[0].dtype == torch.bool else 0
        (part, backward), inputs = self._where(), _tensors((args, kwargs))
        read = _distinct_bytes(
            inputs[name in _OVERWRITES :]
        )  # before an operation that changes a tensor's shape
        result = func(*args, **kwargs)
        outputs = _tensors(result)
        given = {tensor.untyped_storage()._cdata for tensor in inputs}
        new = [
            t
            for t in outputs
            if (key := t.untyped_storage()._cdata) not in given and key not in self._storages
        ]
        self.hold(new, part)
        if func.namespace.startswith(("prim", "c10d", "_c10d")):  # queries of devices, collectives
            return result
        arguments = zip(func._schema.arguments, args, strict=False)
        written = outputs + _tensors([value for argument, value in arguments if argument.is_write])
        is_view = func.is_view or torch.Tag.inplace_view in func.tags or name.startswith(_NO_KERNEL)
        moved = (
            0 if is_view or not any(map(Tensor.numel, written)) else read + _distinct_bytes(written)
        )
        dtype = next((t.dtype for t in inputs + outputs if t.dtype.is_floating_point), None)
        formula = _fft if packet is torch.ops.aten._fft_r2c else flop_registry.get(packet)
        flops = int(formula(*args, **kwargs, out_val=result)) if formula else 0
        shapes = [
            tuple(each.shape)
            for each in (*args, *kwargs.values())
            if isinstance(each, Tensor) and each.dim()
        ]
        self.operations.append(Operation(name, part, backward, flops, moved, dtype, tuple(shapes)))
        return result

    def _where(self) -> tuple[str, bool]:
        if (node := torch._C._current_autograd_node()) is None:
            return self._entered[-1][1], False
        place = bisect.bisect_right(self._entered, node._sequence_nr(), key=lambda entry: entry[0])
        return self._entered[place - 1][1], True

    def _forget(self, key: int, _: object = None) -> None:
        part, num_bytes, _ = self._storages.pop(key, ("other", 0, None))
        self._live[part] -= num_bytes


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _distinct_bytes(tensors: list[Tensor]) -> int:
    """Return the bytes of tensors, counting equal ones and expanded elements once."""
    distinct = {
        (t.untyped_storage()._cdata, t.storage_offset(), t.shape): t for t in tensors
    }.values()
    strides = ((t, zip(t.shape, t.stride(), strict=True)) for t in distinct)
    return sum(
        t.itemsize * math.prod(size for size, stride in each if stride) for t, each in strides
    )


def _fft(tensor: Tensor, dims: list[int], *_: Any, **__: Any) -> float:
    """Return FLOPs of an FFT, for which torch has no formula."""
    points = math.prod(tensor.shape[dim] for dim in dims)
    return tensor.numel() / points * fft_flops(points)
