"""Record the operations of PyTorch code without executing them: FLOPs, bytes moved, live memory.

    with FakeTensorMode(), TraceRecorder(audio=[model.audio]) as recorder:
        run()
    sum(operation.flops for operation in recorder.operations if operation.part == "audio")
    recorder.at_peak.total()

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
# Operations that don't read what they overwrite: their first argument.
_OVERWRITING = ("aten.copy_", "aten.fill_", "aten.zero_")
# Prefixes of operations that make tensors without launching a kernel.
_ALLOCATING = ("aten._unsafe_view", "aten.empty", "aten.new_empty")
# Prefixes of namespaces: queries of devices, and collectives.
_UNRECORDED = ("prim", "c10d", "_c10d")


class Operation(NamedTuple):
    """A dispatched operation."""

    name: str
    # Of the traced code. In the backward pass (including recomputation), the part that is
    # differentiated.
    part: str
    backward: bool
    flops: int
    # Bytes of distinct tensors read and written; 0 if nothing is launched.
    bytes_moved: int
    # Of the first floating-point input or result.
    dtype: torch.dtype | None = None
    # Of tensor arguments in order, like torch.profiler's without empty ones.
    shapes: tuple[tuple[int, ...], ...] = ()


class TraceRecorder(TorchDispatchMode):
    """Dispatched operations except collectives in order, the bytes of live storages, and their
    peak, also by part.

    Keywords name parts: modules whose forward and backward passes belong to them.
    """

    def __init__(self, **parts: Iterable[nn.Module]) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.at_peak = Counter[str]()
        self._live = Counter[str]()
        # By address: part, bytes, and a reference that reports the storage's deletion.
        self._storages: dict[int, tuple[str, int, Any]] = {}
        # The autograd sequence number from which on a part is being executed. A backward operation
        # has the number of the forward operation that it differentiates.
        self._entered = [(0, "other")]
        outer_parts: list[str] = []
        for name, modules in parts.items():
            for module in modules:
                module.register_forward_pre_hook(
                    lambda *_, name=name: outer_parts.append(self._enter(name)), prepend=True
                )
                module.register_forward_hook(lambda *_: self._leave(outer_parts), always_call=True)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Assign operations dispatched within, and their backward pass, to this part."""
        outer_part = self._enter(name)
        yield
        self._enter(outer_part)

    def _enter(self, name: str) -> str:
        """Begin a part, and return the current one."""
        _, outer_part = self._entered[-1]
        self._entered.append((torch.autograd._get_sequence_nr(), name))
        return outer_part

    def _leave(self, outer_parts: list[str]) -> None:
        self._enter(outer_parts.pop())

    def track(self, tree: Any, part: str) -> None:
        """Count tensors of any containers as live and assign them to a part, even if they were
        counted before."""
        for tensor in _tensors_in(tree):
            storage = tensor.untyped_storage()
            address = storage._cdata
            self._forget(address)
            reference = weakref.ref(storage, partial(self._forget, address))
            self._storages[address] = (part, storage.nbytes(), reference)
            self._live[part] += storage.nbytes()
            if self._live.total() > self.at_peak.total():
                self.at_peak = self._live.copy()

    def reset(self) -> None:
        """Clear the operations and reset the peak to the live memory."""
        self.operations.clear()
        self.at_peak = self._live.copy()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func._overloadpacket)
        is_read_by_host = name == "aten._local_scalar_dense"
        if is_read_by_host and isinstance(args[0], FakeTensor):
            return False if args[0].dtype == torch.bool else 0
        part, is_backward = self._current_part()
        inputs = _tensors_in((args, kwargs))
        # Before an operation that changes a tensor's shape.
        num_unread = 1 if name in _OVERWRITING else 0
        bytes_read = _distinct_bytes(inputs[num_unread:])

        result = func(*args, **kwargs)

        outputs = _tensors_in(result)
        self._track_new(inputs, outputs, part)
        if func.namespace.startswith(_UNRECORDED):
            return result
        bytes_moved = 0
        if _launches_kernel(func, name):
            written = outputs + _tensors_in(_mutated(func, args))
            # Nothing is launched for empty tensors.
            if any(tensor.numel() for tensor in written):
                bytes_moved = bytes_read + _distinct_bytes(written)
        dtypes = [tensor.dtype for tensor in inputs + outputs]
        operation = Operation(
            name,
            part,
            is_backward,
            _flops_of(func, args, kwargs, result),
            bytes_moved,
            dtype=next((dtype for dtype in dtypes if dtype.is_floating_point), None),
            shapes=_shapes_of((*args, *kwargs.values())),
        )
        self.operations.append(operation)
        return result

    def _track_new(self, inputs: list[Tensor], outputs: list[Tensor], part: str) -> None:
        """Track outputs that aren't views of inputs or of tracked tensors."""
        input_addresses = {_address(tensor) for tensor in inputs}
        for tensor in outputs:
            address = _address(tensor)
            if address not in input_addresses and address not in self._storages:
                self.track(tensor, part)

    def _current_part(self) -> tuple[str, bool]:
        """Return the part, and whether this is the backward pass."""
        node = torch._C._current_autograd_node()
        if node is None:
            return self._entered[-1][1], False
        # The last part that was entered up to the differentiated operation.
        index = bisect.bisect_right(self._entered, node._sequence_nr(), key=lambda entry: entry[0])
        return self._entered[index - 1][1], True

    def _forget(self, address: int, _: object = None) -> None:
        if address in self._storages:
            part, num_bytes, _reference = self._storages.pop(address)
            self._live[part] -= num_bytes


def _tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _distinct_bytes(tensors: list[Tensor]) -> int:
    """Return the bytes of tensors, counting equal ones and expanded elements once."""
    distinct = {
        (_address(tensor), tensor.storage_offset(), tensor.shape): tensor for tensor in tensors
    }
    num_bytes = 0
    for tensor in distinct.values():
        # A dimension of stride 0 repeats the same elements.
        dimensions = zip(tensor.shape, tensor.stride(), strict=True)
        num_elements = math.prod(size for size, stride in dimensions if stride)
        num_bytes += tensor.itemsize * num_elements
    return num_bytes


def _launches_kernel(func: Any, name: str) -> bool:
    is_view = func.is_view or torch.Tag.inplace_view in func.tags
    return not is_view and not name.startswith(_ALLOCATING)


def _mutated(func: Any, args: tuple[Any, ...]) -> list[Any]:
    """Return the arguments that an operation writes to."""
    arguments = zip(func._schema.arguments, args, strict=False)
    return [value for argument, value in arguments if argument.is_write]


def _shapes_of(values: Iterable[Any]) -> tuple[tuple[int, ...], ...]:
    tensors = [value for value in values if isinstance(value, Tensor)]
    return tuple(tuple(tensor.shape) for tensor in tensors if tensor.dim())


def _flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    packet = func._overloadpacket
    if packet is torch.ops.aten._fft_r2c:
        # torch has no formula for it.
        tensor, dims = args[:2]
        num_points = math.prod(tensor.shape[dim] for dim in dims)
        return int(tensor.numel() / num_points * fft_flops(num_points))
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=result))
    return 0
