"""The CPU kernel for captions' attention against attention written out per segment in fp32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from clap_ds.model import segment_attention_native as native
from clap_ds.model.segment_attention_native import Segments, segments_of_packed, segments_of_padded
from clap_ds.native import library

# Where there are matrix units, a library that doesn't compile fails.
pytestmark = pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason=library.unavailable())

HEADS = 3
Attention = Callable[[Tensor, Tensor, Tensor, int, Segments, float], Tensor]


def attend_by_segment(q: Tensor, k: Tensor, v: Tensor, heads: int, segments: Segments, scale: float) -> Tensor:
    """softmax(q kᵀ) v in the tensors' dtype, segment by segment."""
    output = torch.zeros_like(q)
    for query, queries, key, keys in zip(*(places.tolist() for places in segments), strict=True):
        if not keys:
            continue
        rows = (q[query : query + queries], k[key : key + keys], v[key : key + keys])
        own_q, own_k, own_v = (tensor.unflatten(1, (heads, -1)).transpose(0, 1) for tensor in rows)
        weights = (own_q * scale @ own_k.transpose(1, 2)).softmax(dim=-1)
        output[query : query + queries] = (weights @ own_v).transpose(0, 1).flatten(1)
    return output


def with_gradients(attend: Attention, inputs: list[Tensor], segments: Segments, probe: Tensor) -> list[Tensor]:
    """The output and the gradients of q, k and v, in fp32."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    head_dim = inputs[0].shape[1] // HEADS
    output = attend(*leaves, HEADS, segments, head_dim**-0.5)
    output.backward(probe.to(output.dtype))
    return [tensor.detach().float() for tensor in (output, *(leaf.grad for leaf in leaves))]


def random_inputs(query_rows: int, key_rows: int, head_dim: int = 64) -> list[Tensor]:
    """q, k, v and the output's gradient in bf16, with weights that are far from uniform."""
    torch.manual_seed(0)
    columns = HEADS * head_dim
    q, k, v = (torch.randn(rows, columns) for rows in (query_rows, key_rows, key_rows))
    return [tensor.bfloat16() for tensor in (2 * q, k, v, torch.randn(query_rows, columns))]


def packed_bounds(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def random_lengths(count: int) -> list[int]:
    return torch.randint(1, 78, (count,), generator=torch.Generator().manual_seed(1)).tolist()


SOME = torch.tensor([77, 1, 40, 0, 16, 33])
CASES = {
    "padded": (4 * 77, 4 * 77, segments_of_padded(4, 77, None, False)),
    "padded, of many lengths": (6 * 77, 6 * 77, segments_of_padded(6, 77, SOME, False)),
    "padded, first only": (6, 6 * 77, segments_of_padded(6, 77, SOME, True)),
    "packed": (
        sum(random_lengths(12)),
        sum(random_lengths(12)),
        segments_of_packed(packed_bounds(random_lengths(12)), None, False),
    ),
    "packed, first only": (
        12,
        sum(random_lengths(12)),
        segments_of_packed(packed_bounds(random_lengths(12)), 12, True),
    ),
    "packed, all short": (36, 36, segments_of_packed(packed_bounds(list(range(1, 9))), None, False)),
    "packed, an empty caption and one of filling": (
        *(60, 60),
        segments_of_packed(packed_bounds([20, 0, 30, 10]), 3, False),
    ),
    "514 tokens": (514 + 17, 514 + 17, segments_of_packed(packed_bounds([514, 17]), None, False)),
    "gaps everywhere": (
        *(50, 90),
        Segments(*(torch.tensor(places).int() for places in ([3, 20, 40], [5, 0, 7], [2, 30, 70], [20, 33, 18]))),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_those_of_attention_by_definition(name: str) -> None:
    """Oracle: fp32 on the same bf16 values. The bound is what the same in plain bf16 is off by."""
    query_rows, key_rows, segments = CASES[name]
    *inputs, probe = random_inputs(query_rows, key_rows)
    expected = with_gradients(attend_by_segment, [tensor.float() for tensor in inputs], segments, probe)
    plain = with_gradients(attend_by_segment, inputs, segments, probe)
    got = with_gradients(native.native_segment_attention, inputs, segments, probe)
    for what, ours, theirs, right in zip(("out", "dq", "dk", "dv"), got, plain, expected, strict=True):
        scale = right.abs().max()
        assert ((ours - right).norm() / right.norm()) < 0.006, what
        assert (ours - right).norm() <= 1.1 * (theirs - right).norm(), what
        assert (ours - right).abs().max() <= max(1.5 * (theirs - right).abs().max(), 0.004 * scale), what
    assert (got[0][expected[0].abs().sum(dim=1) == 0] == 0).all()
    for gradient, start, rows in zip(
        got[1:], (segments[0], *segments[2:3] * 2), (segments[1], *segments[3:] * 2), strict=True
    ):
        assert (gradient[outside(start, rows, len(gradient))] == 0).all()


def outside(start: Tensor, rows: Tensor, total: int) -> Tensor:
    """(total,) bool, True at rows of no segment."""
    row = torch.arange(total)
    return ~((row >= start[:, None]) & (row < (start + rows)[:, None])).any(dim=0)


@pytest.mark.parametrize("head_dim", native.HEAD_DIMS)
def test_every_head_dim(head_dim: int) -> None:
    segments = segments_of_packed(packed_bounds([50, 20]), None, False)
    *inputs, probe = random_inputs(70, 70, head_dim)
    expected = with_gradients(attend_by_segment, [tensor.float() for tensor in inputs], segments, probe)
    got = with_gradients(native.native_segment_attention, inputs, segments, probe)
    for ours, right in zip(got, expected, strict=True):
        assert ((ours - right).norm() / right.norm()) < 0.006


@pytest.mark.parametrize("name", ["padded, of many lengths", "packed", "packed, an empty caption and one of filling"])
def test_side_by_side_is_the_same_and_so_is_every_run(name: str) -> None:
    rows, _, segments = CASES[name]
    *inputs, probe = random_inputs(rows, rows)
    expected = with_gradients(native.native_segment_attention, inputs, segments, probe)
    for _ in range(3):
        qkv = torch.cat(inputs, dim=1).requires_grad_()
        output = native.native_segment_attention_qkv(qkv, HEADS, segments, 64**-0.5)
        output.backward(probe)
        assert qkv.grad.is_contiguous()
        for ours, other in zip((output, *qkv.grad.chunk(3, dim=1)), expected, strict=True):
            assert torch.equal(ours.float(), other)


def test_slices_and_transposes_are_taken_as_they_lie() -> None:
    rows, _, segments = CASES["packed"]
    *inputs, probe = random_inputs(rows, rows)
    expected = with_gradients(native.native_segment_attention, inputs, segments, probe)
    q, k, v = (tensor.t().contiguous().t() if i == 0 else tensor for i, tensor in enumerate(inputs))
    kv = torch.cat([k, v], dim=1).requires_grad_()
    q.requires_grad_()
    output = native.native_segment_attention(q, *kv.chunk(2, dim=1), HEADS, segments, 64**-0.5)
    output.backward(probe.t().contiguous().t())
    for ours, other in zip((output, q.grad, *kv.grad.chunk(2, dim=1)), expected, strict=True):
        assert torch.equal(ours.float(), other)


def test_large_scores_neither_overflow_nor_vanish() -> None:
    segments = segments_of_padded(2, 40, torch.tensor([40, 7]), False)
    *inputs, probe = random_inputs(80, 80)
    inputs = [inputs[0] * 100, inputs[1], inputs[2]]
    expected = with_gradients(attend_by_segment, [tensor.float() for tensor in inputs], segments, probe)
    got = with_gradients(native.native_segment_attention, inputs, segments, probe)
    for ours, right in zip(got, expected, strict=True):
        assert ((ours - right).norm() / right.norm()) < 0.01


def test_segments_are_where_captions_lie() -> None:
    def as_lists(segments: Segments) -> list[list[int]]:
        assert all(places.dtype == torch.int32 for places in segments)
        return [places.tolist() for places in segments]

    lengths = torch.tensor([3, 5])
    assert as_lists(segments_of_padded(2, 5, None, False)) == [[0, 5], [5, 5], [0, 5], [5, 5]]
    assert as_lists(segments_of_padded(2, 5, lengths, False)) == [[0, 5], [5, 5], [0, 5], [3, 5]]
    assert as_lists(segments_of_padded(2, 5, lengths, True)) == [[0, 1], [1, 1], [0, 5], [3, 5]]
    bounds = packed_bounds([3, 5, 2])
    assert as_lists(segments_of_packed(bounds, None, False)) == [[0, 3, 8], [3, 5, 2], [0, 3, 8], [3, 5, 2]]
    assert as_lists(segments_of_packed(bounds, 2, False)) == [[0, 3], [3, 5], [0, 3], [3, 5]]
    assert as_lists(segments_of_packed(bounds, 2, True)) == [[0, 1], [1, 1], [0, 3], [3, 5]]


def test_rows_of_no_segment_have_no_influence() -> None:
    query_rows, key_rows, segments = CASES["gaps everywhere"]
    *inputs, probe = random_inputs(query_rows, key_rows)
    expected = with_gradients(native.native_segment_attention, inputs, segments, probe)
    places = [(segments.query_start, segments.query_rows)] + [(segments.key_start, segments.key_rows)] * 2
    for tensor, (start, rows) in zip((*inputs, probe), (*places, places[0]), strict=True):
        tensor[outside(start, rows, len(tensor))] = float("nan")
    for ours, other in zip(
        with_gradients(native.native_segment_attention, inputs, segments, probe), expected, strict=True
    ):
        assert torch.equal(ours, other)


def test_what_is_not_a_number_stays_so() -> None:
    segments = segments_of_packed(packed_bounds([20, 20]), None, False)
    *inputs, _ = random_inputs(40, 40)
    inputs[1][3, 5] = float("nan")
    output = native.native_segment_attention(*inputs, HEADS, segments, 64**-0.5)
    assert output[:20, :64].isnan().all()
    assert output[20:].isfinite().all()
    assert output[:, 64:].isfinite().all()


def test_no_segments_give_zeros() -> None:
    *inputs, probe = random_inputs(8, 8)
    segments = segments_of_packed(torch.zeros(1, dtype=torch.int32), None, False)
    for tensor in with_gradients(native.native_segment_attention, inputs, segments, probe):
        assert (tensor == 0).all()


def test_supported_are_bf16_on_cpu_and_whole_tiles() -> None:
    cpu = torch.device("cpu")
    assert native.supports(torch.bfloat16, cpu, 64)
    assert not native.supports(torch.float32, cpu, 64)
    assert not native.supports(torch.bfloat16, torch.device("meta"), 64)
    assert not native.supports(torch.bfloat16, cpu, 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v, s: (q.float(), k, v, 3, s, 1.0), "expected bf16 rows on CPU"),
        (lambda q, k, v, s: (q, k, v, 4, s, 1.0), "192 columns are not 4 heads"),
        (lambda q, k, v, s: (q, k, v[1:], 3, s, 1.0), "don't fit together"),
        (lambda q, k, v, s: (q, k, v, 3, s, 0.0), "scale must be above 0"),
        (
            lambda q, k, v, s: (q, k, v, 3, s._replace(key_rows=s.key_rows.long()), 1.0),
            "segments must be contiguous int32",
        ),
    ],
)
def test_other_arguments_are_refused(change: Callable[..., tuple], message: str) -> None:
    *inputs, _ = random_inputs(20, 20)
    with pytest.raises(ValueError, match=message):
        native.native_segment_attention(*change(*inputs, segments_of_padded(2, 10, None, False)))
