"""The CPU kernel for captions' attention against attention written out per segment in fp32."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from clap_ds.native import segment_attention as native
from clap_ds.native.segment_attention import Segments, segments_of_packed, segments_of_padded
from tests.kernels import needs_amx

# Where there are matrix units, a library that doesn't compile fails.
pytestmark = needs_amx

HEADS = 3
Attention = Callable[[Tensor, Tensor, Tensor, int, Segments, float], Tensor]


class Kept(NamedTuple):
    """What dropout with this probability leaves: of each segment, (A, queries, keys) bool."""

    masks: list[Tensor]
    probability: float


def attend_by_segment(
    q: Tensor, k: Tensor, v: Tensor, heads: int, segments: Segments, scale: float, kept: Kept | None = None
) -> Tensor:
    """dropout(softmax(q kᵀ)) v in the tensors' dtype, segment by segment."""
    output = torch.zeros_like(q)
    for i, (query, queries, key, keys) in enumerate(zip(*(places.tolist() for places in segments), strict=True)):
        if not keys:
            continue
        rows = (q[query : query + queries], k[key : key + keys], v[key : key + keys])
        own_q, own_k, own_v = (tensor.unflatten(1, (heads, -1)).transpose(0, 1) for tensor in rows)
        weights = (own_q * scale @ own_k.transpose(1, 2)).softmax(dim=-1)
        if kept is not None:
            weights = weights * kept.masks[i] / (1 - kept.probability)
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
    assert_as_exact_as_torch(got, plain, expected)
    assert (got[0][expected[0].abs().sum(dim=1) == 0] == 0).all()
    for gradient, start, rows in zip(
        got[1:], (segments[0], *segments[2:3] * 2), (segments[1], *segments[3:] * 2), strict=True
    ):
        assert (gradient[outside(start, rows, len(gradient))] == 0).all()


def assert_as_exact_as_torch(got: list[Tensor], plain: list[Tensor], expected: list[Tensor]) -> None:
    """Each as near to fp32 as what torch gets in bf16."""
    for what, ours, theirs, right in zip(("out", "dq", "dk", "dv"), got, plain, expected, strict=True):
        scale = right.abs().max()
        assert ((ours - right).norm() / right.norm()) < 0.006, what
        assert (ours - right).norm() <= 1.1 * (theirs - right).norm(), what
        assert (ours - right).abs().max() <= max(1.5 * (theirs - right).abs().max(), 0.004 * scale), what


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


def masks_drawn(seed: int, segments: Segments, dropout: float) -> list[Tensor]:
    """(A, queries, keys) bool of each segment: the weights that stay after `torch.manual_seed(seed)`. With equal scores, values
    that are 1 in one column alone show each key's weight in a column of its own; a call shows as many keys as columns."""
    places = list(zip(*(each.tolist() for each in segments), strict=True))
    query_rows, key_rows = (int((start + rows).max()) for start, rows in (segments[:2], segments[2:]))
    columns = 128
    calls = -(-int(segments.key_rows.max()) // columns)
    q, k = (torch.zeros(rows, HEADS * columns).bfloat16() for rows in (query_rows, key_rows))
    weights = []
    for one_hot in torch.eye(calls * columns).split(columns, dim=1):
        v = torch.zeros(key_rows, HEADS * columns).bfloat16()
        for _, _, key, keys in places:
            v[key : key + keys] = one_hot[:keys].bfloat16().repeat(1, HEADS)
        torch.manual_seed(seed)
        output = native.native_segment_attention(q, k, v, HEADS, segments, 1.0, dropout)
        weights.append(output.float().unflatten(1, (HEADS, columns)).transpose(0, 1))
    masks = []
    for query, queries, _, keys in places:
        own = torch.cat(weights, dim=2)[:, query : query + queries, :keys] * keys * (1 - dropout)
        assert ((own == 0) | ((own - 1).abs() < 0.01)).all()
        masks.append(own != 0)
    return masks


@pytest.mark.parametrize("dropout", [0.1, 0.6])
@pytest.mark.parametrize("name", CASES)
def test_dropout_is_that_of_its_mask(name: str, dropout: float) -> None:
    """Oracle: as without, with the weights that the kernel leaves at other inputs."""
    query_rows, key_rows, segments = CASES[name]
    kept = Kept(masks_drawn(5, segments, dropout), dropout)
    *inputs, probe = random_inputs(query_rows, key_rows)
    by_segment = functools.partial(attend_by_segment, kept=kept)
    expected = with_gradients(by_segment, [tensor.float() for tensor in inputs], segments, probe)
    plain = with_gradients(by_segment, inputs, segments, probe)
    torch.manual_seed(5)
    got = with_gradients(functools.partial(native.native_segment_attention, dropout=dropout), inputs, segments, probe)
    assert_as_exact_as_torch(got, plain, expected)


@pytest.mark.parametrize("head_dim", native.HEAD_DIMS)
def test_dropout_with_every_head_dim_and_side_by_side(head_dim: int) -> None:
    segments = segments_of_packed(packed_bounds([50, 20]), None, False)
    *inputs, probe = random_inputs(70, 70, head_dim)
    by_segment = functools.partial(attend_by_segment, kept=Kept(masks_drawn(6, segments, 0.3), 0.3))
    expected = with_gradients(by_segment, [tensor.float() for tensor in inputs], segments, probe)
    torch.manual_seed(6)
    apart = with_gradients(functools.partial(native.native_segment_attention, dropout=0.3), inputs, segments, probe)
    qkv = torch.cat(inputs, dim=1).requires_grad_()
    torch.manual_seed(6)
    output = native.native_segment_attention_qkv(qkv, HEADS, segments, head_dim**-0.5, 0.3)
    output.backward(probe)
    together = (output, *qkv.grad.chunk(3, dim=1))
    for ours, other, right in zip(apart, together, expected, strict=True):
        assert ((ours - right).norm() / right.norm()) < 0.006
        assert torch.equal(ours, other.float())


@pytest.mark.parametrize("dropout", [0.1, 0.5, 0.9])
def test_dropped_are_as_many_as_asked_for_everywhere(dropout: float) -> None:
    """Standard deviations from the expected number: of all weights, and of each query, each key and each head."""
    masks = torch.stack(masks_drawn(7, segments_of_padded(16, 77, None, False), dropout)).float()
    for dims, most in (((0, 1, 2, 3), 4.0), ((0, 1, 2), 5.0), ((0, 1, 3), 5.0), ((2, 3), 5.0)):
        count = torch.tensor([masks.shape[dim] for dim in dims]).prod()
        deviation = (masks.mean(dim=dims) - (1 - dropout)) / (dropout * (1 - dropout) / count).sqrt()
        assert deviation.abs().max() < most, dims


def test_masks_of_heads_segments_rows_and_calls_are_unrelated() -> None:
    segments = segments_of_padded(8, 77, None, False)
    calls = [torch.stack(masks_drawn(seed, segments, 0.5)) for seed in (8, 9)]
    assert torch.equal(torch.stack(masks_drawn(8, segments, 0.5)), calls[0])
    masks = torch.cat(calls).flatten(0, 1).float()  # (calls · segments · heads, queries, keys)
    for each in (masks.flatten(1), masks.flatten(0, 1), masks.transpose(1, 2).flatten(0, 1)):
        correlation = each.corrcoef().fill_diagonal_(0.0)
        assert correlation.abs().max() < 6.5 / each.shape[1] ** 0.5
        assert abs(correlation.square().mean() * each.shape[1] - 1) < 0.1


def test_each_call_draws_another_mask_and_none_without_dropout() -> None:
    rows, _, segments = CASES["packed"]
    *inputs, _ = random_inputs(rows, rows)
    attend = functools.partial(native.native_segment_attention, *inputs, HEADS, segments, 64**-0.5)
    torch.manual_seed(10)
    before = torch.get_rng_state()
    assert torch.equal(attend(dropout=0.0), attend())
    assert torch.equal(torch.get_rng_state(), before)
    first, second = attend(dropout=0.1), attend(dropout=0.1)
    assert not torch.equal(first, second)
    torch.manual_seed(10)
    assert torch.equal(attend(dropout=0.1), first)
    assert torch.equal(attend(dropout=0.1), second)


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
        (lambda q, k, v, s: (q, k, v, 3, s, 1.0, 1.0), "dropout must be at least 0 and below 1"),
        (lambda q, k, v, s: (q, k, v, 3, s, 1.0, -0.1), "dropout must be at least 0 and below 1"),
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
