"""Record the operations of PyTorch code without executing them: FLOPs, bytes moved, kernels, live memory.

    with FakeTensorMode(), trace(parts={"audio": [model.audio]}) as recorded:
        run()
    recorded.total("flops", part="audio"); recorded.peak_bytes

Under `FakeTensorMode` nothing is computed or allocated, and values that the host reads are 0. A storage lives until its
last tensor is deleted. FLOPs follow `torch.utils.flop_counter`'s formulas, and FFTs are added here.
"""

from __future__ import annotations

import bisect
import math
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from clap_ds.flop_count.analytic import fft_flops

_OVERWRITES = ("aten.copy_", "aten.fill_", "aten.zero_")
"""Operations that don't read what they overwrite."""
_NO_KERNEL = frozenset({
    "aten._reshape_alias", "aten._unsafe_view", "aten.detach", "aten.empty", "aten.empty_like", "aten.empty_strided",
    "aten.empty_permuted", "aten.lift_fresh", "aten.new_empty", "aten.new_empty_strided", "aten._local_scalar_dense",
    "aten.is_same_size",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Operation:
    """Describe a dispatched operation.

    Attributes:
        part: part of the traced code; in the backward pass (including recomputation), the part that is differentiated.
        read, written: numbers and bytes of storages. Empty if nothing is launched.
        dtype: dtype of the first floating-point input or result.
        shapes: tensor arguments' shapes in order, like torch.profiler's `record_shapes` without empty entries.
    """

    name: str
    part: str
    backward: bool
    flops: int
    read: tuple[tuple[int, int], ...]
    written: tuple[tuple[int, int], ...]
    launches: bool
    dtype: torch.dtype | None
    shapes: tuple[tuple[int, ...], ...] = ()

    @property
    def bytes_moved(self) -> int:
        return sum(num_bytes for _, num_bytes in self.read + self.written)

    @property
    def is_collective(self) -> bool:
        return self.name.startswith(("c10d.", "_c10d_functional."))


@dataclass(slots=True)
class _Storage:
    number: int
    reference: weakref.ref[Any]
    num_bytes: int
    part: str | None = None  # None until counted


class Recorded(TorchDispatchMode):
    """Record dispatched operations in order, the bytes of live storages, and their peak, also by part."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.live_bytes = self.peak_bytes = 0
        self.at_peak: dict[str, int] = {}
        self._live: defaultdict[str, int] = defaultdict(int)
        self._storages: dict[int, _Storage] = {}
        self._num_storages = 0
        self._entered = [(0, "other")]

    def total(self, what: str, *, part: str | None = None, backward: bool | None = None) -> int:
        """Sum a numeric attribute of `Operation` without collectives."""
        own = [each for each in self.operations if part in (None, each.part) and backward in (None, each.backward)]
        return sum(int(getattr(each, what)) for each in own if not each.is_collective)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Assign operations dispatched within, and their backward pass, to this part."""
        before = self.enter(name)
        yield
        self.enter(before)

    def enter(self, name: str) -> str:
        self._entered.append((torch.autograd._get_sequence_nr(), name))
        return self._entered[-2][1]

    def hold(self, tensors: Iterable[Any], part: str) -> None:
        """Count tensors as live and assign them to a part, even if they were counted before."""
        for tensor in tensors:
            storage = self._storage(tensor)
            self._count(storage, -1)
            storage.part = part
            self._count(storage, 1)

    def restart(self) -> None:
        """Clear the operations and reset the peak to the live memory."""
        self.operations.clear()
        self.peak_bytes, self.at_peak = self.live_bytes, dict(self._live)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, str(func._overloadpacket)
        if func.namespace == "prim":  # queries a fake tensor's device
            return func(*args, **kwargs)
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:  # composites reach this only in inference mode
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if name == "aten._local_scalar_dense" and isinstance(args[0], FakeTensor):
            return False if args[0].dtype == torch.bool else 0
        (part, backward), inputs = self._where(), _tensors((args, kwargs))
        read, before = self._places(inputs[name in _OVERWRITES :]), self._num_storages
        result = func(*args, **kwargs)
        outputs = _tensors(result)
        written = self._places(outputs + _mutated(func, args, kwargs))
        is_view = func.is_view or torch.Tag.inplace_view in func.tags  # such as transpose_
        launches = not (is_view or name in _NO_KERNEL) and any(tensor.numel() for tensor in inputs + outputs)
        dtype = next((t.dtype for t in (*inputs, *outputs) if t.dtype.is_floating_point), None)
        formula = _fft if name == "aten._fft_r2c" else flop_registry.get(func._overloadpacket)
        flops = int(formula(*args, **kwargs, out_val=result)) if formula else 0
        moved = (read, written) if launches else ((), ())
        given = (*args, *kwargs.values())
        shapes = tuple(tuple(each.shape) for each in given if isinstance(each, Tensor) and each.dim())
        self.operations.append(Operation(name, part, backward, flops, *moved, launches, dtype, shapes))
        for storage in map(self._storage, outputs):
            if storage.part is None and storage.number > before:
                storage.part = part
                self._count(storage, 1)
        return result

    def _where(self) -> tuple[str, bool]:
        if (node := torch._C._current_autograd_node()) is None:
            return self._entered[-1][1], False
        place = bisect.bisect_right(self._entered, node._sequence_nr(), key=lambda entry: entry[0])
        return self._entered[place - 1][1], True

    def _places(self, tensors: Iterable[Tensor]) -> tuple[tuple[int, int], ...]:
        distinct = {(t.untyped_storage()._cdata, t.storage_offset(), tuple(t.shape)): t for t in tensors}
        return tuple((self._storage(tensor).number, _bytes(tensor)) for tensor in distinct.values())

    def _storage(self, tensor: Tensor) -> _Storage:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if (known := self._storages.get(key)) is None:
            self._num_storages += 1
            reference = weakref.ref(storage, partial(self._forget, key))
            known = self._storages[key] = _Storage(self._num_storages, reference, storage.nbytes())
        return known

    def _forget(self, key: int, _: object) -> None:
        self._count(self._storages.pop(key), -1)

    def _count(self, storage: _Storage, sign: int) -> None:
        if storage.part is not None:
            self._live[storage.part] += sign * storage.num_bytes
            self.live_bytes += sign * storage.num_bytes
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes, self.at_peak = self.live_bytes, dict(self._live)


@contextmanager
def trace(parts: Mapping[str, Iterable[nn.Module]] | None = None) -> Iterator[Recorded]:
    """Record operations dispatched within; `parts` maps names to modules whose forward and backward passes belong to it."""
    recorded, before = Recorded(), list[str]()
    with ExitStack() as stack:
        for name, modules in (parts or {}).items():
            for module in modules:
                enter = partial(lambda name, *_: before.append(recorded.enter(name)), name)
                stack.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
                leave = module.register_forward_hook(lambda *_: recorded.enter(before.pop()) and None, always_call=True)
                stack.callback(leave.remove)
        yield stack.enter_context(recorded)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor, counting expanded elements once."""
    strided = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(size for size, stride in strided if stride) * tensor.itemsize if tensor.numel() else 0


def _mutated(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    schema = func._schema.arguments
    given = zip(schema, [*args, *(kwargs.get(argument.name) for argument in schema[len(args) :])], strict=False)
    return _tensors([value for argument, value in given if argument.alias_info and argument.alias_info.is_write])


def _fft(input: Tensor, dims: list[int], *_: Any, **__: Any) -> float:
    """Count an FFT's FLOPs, for which torch has no formula."""
    points = math.prod(input.shape[dim] for dim in dims)
    return input.numel() / points * fft_flops(points)
