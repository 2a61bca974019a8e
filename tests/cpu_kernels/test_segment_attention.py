"""Test the CPU kernel for captions' attention against attention per segment."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from clap_ds.cpu_kernels.segment_attention import HEAD_DIMS, Segments, native_segment_attention
from tests.cpu_kernels.exactness import assert_within_roundings, numbers, results
from tests.kernels import each_implementation

pytestmark = each_implementation

HEADS = 3
SEED = 5
LENGTHS = torch.randint(1, 78, (12,), generator=torch.Generator().manual_seed(1)).tolist()


def ranges_of(segments: Segments) -> list[tuple[slice, slice]]:
    """Return each segment's rows of queries, and of keys and values."""
    rows = zip(*(column.tolist() for column in segments), strict=True)
    return [
        (slice(query, query + num_queries), slice(key, key + num_keys))
        for query, num_queries, key, num_keys in rows
    ]


def by_segment(
    segments: Segments, dropout: float = 0.0
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return dropout(softmax(q kᵀ)) v per segment in the tensors' dtype, dropping the same weights
    as the kernel."""
    masks = drawn_masks(SEED, segments, dropout) if dropout else None

    def split_heads(rows: Tensor) -> Tensor:
        return rows.unflatten(1, (HEADS, -1)).transpose(0, 1)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        output = torch.zeros_like(q)
        scale = (q.shape[1] // HEADS) ** -0.5
        for number, (queries, keys) in enumerate(ranges_of(segments)):
            if keys.start == keys.stop:
                continue
            scores = split_heads(q[queries]) * scale @ split_heads(k[keys]).transpose(1, 2)
            weights = scores.softmax(dim=-1)
            if masks is not None:
                weights = weights * masks[number] / (1 - dropout)
            output[queries] = (weights @ split_heads(v[keys])).transpose(0, 1).flatten(1)
        return output

    return attend


def attention(segments: Segments, dropout: float = 0.0) -> Callable[..., Tensor]:
    """Return the kernel's attention for q, k and v in any number of tensors."""

    def attend(*tensors: Tensor) -> Tensor:
        torch.manual_seed(SEED)
        head_dim = sum(tensor.shape[1] for tensor in tensors) // 3 // HEADS
        return native_segment_attention(tensors, HEADS, segments, head_dim**-0.5, dropout)

    return attend


def draw(query_rows: int, key_rows: int, head_dim: int = 64) -> list[Tensor]:
    """Draw q, k, v and the output's gradient in bf16, with weights far from uniform."""
    columns = HEADS * head_dim
    q = numbers(query_rows, columns, seed=0, scale=2.0)
    k, v = (numbers(key_rows, columns, seed=seed) for seed in (2, 3))
    return [q, k, v, numbers(query_rows, columns, seed=1)]


def padded(batch: int, lengths: Tensor | None = None, first_only: bool = False) -> Segments:
    start = torch.arange(batch, dtype=torch.int32) * 77
    return Segments.of_captions(start, torch.full_like(start, 77), lengths, first_only=first_only)


def packed(lengths: list[int], first_only: bool = False) -> Segments:
    rows = torch.tensor(lengths, dtype=torch.int32)
    return Segments.of_captions((rows.cumsum(0) - rows).int(), rows, first_only=first_only)


SOME = torch.tensor([77, 1, 40, 0, 16, 33]).int()
GAPS = Segments(*torch.tensor([[3, 20, 40], [5, 0, 7], [2, 30, 70], [20, 33, 18]]).int())
CASES = {
    "padded, of many lengths": (6 * 77, 6 * 77, padded(6, SOME)),
    "padded, first only": (6, 6 * 77, padded(6, SOME, True)),
    "packed": (sum(LENGTHS), sum(LENGTHS), packed(LENGTHS)),
    "packed, first only": (12, sum(LENGTHS), packed(LENGTHS, True)),
    "514 tokens": (514 + 17, 514 + 17, packed([514, 17])),
    "gaps everywhere": (50, 90, GAPS),
}


def is_outside(ranges: list[slice], size: int) -> Tensor:
    """Return (rows,) bool: True for rows outside of segments."""
    outside = torch.ones(size, dtype=torch.bool)
    for rows in ranges:
        outside[rows] = False
    return outside


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_equal_attention_by_definition(name: str) -> None:
    """Compare with fp32 on the same bf16 values."""
    # Masks are drawn for up to 128 keys.
    dropout = 0.0 if name == "514 tokens" else 0.3
    query_rows, key_rows, segments = CASES[name]
    *inputs, probe = draw(query_rows, key_rows)
    kernel = attention(segments, dropout)
    assert_within_roundings(kernel, by_segment(segments, dropout), inputs, probe)

    output, d_q, d_k, d_v = results(kernel, inputs, probe)
    queries, keys = zip(*ranges_of(segments), strict=True)
    for tensor in (output, d_q):
        assert not tensor[is_outside(queries, query_rows)].any()
    for tensor in (d_k, d_v):
        assert not tensor[is_outside(keys, key_rows)].any()


def drawn_masks(seed: int, segments: Segments, dropout: float) -> list[Tensor]:
    """Return (A, queries, keys) bool per segment: the weights kept after `torch.manual_seed(seed)`.
    With equal scores and one-hot values, each key's weight appears in its own column."""
    ranges = ranges_of(segments)
    columns = 128
    query_rows = max(queries.stop for queries, _ in ranges)
    key_rows = max(keys.stop for _, keys in ranges)
    q, k, v = (
        torch.zeros(rows, HEADS * columns).bfloat16() for rows in (query_rows, key_rows, key_rows)
    )
    one_hot = torch.eye(columns).bfloat16().repeat(1, HEADS)
    for _, keys in ranges:
        v[keys] = one_hot[: keys.stop - keys.start]
    torch.manual_seed(seed)
    output = native_segment_attention((q, k, v), HEADS, segments, 1.0, dropout)
    weights = output.float().unflatten(1, (HEADS, columns)).transpose(0, 1)
    return [weights[:, queries, : keys.stop - keys.start] != 0 for queries, keys in ranges]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_tensors_apart_and_side_by_side_are_equal(head_dim: int) -> None:
    segments = packed([50, 20])
    *inputs, probe = draw(70, 70, head_dim)
    attend = attention(segments, 0.3)
    assert_within_roundings(attend, by_segment(segments, 0.3), inputs, probe)
    output, *gradients = results(attend, inputs, probe)
    q, k, v = inputs
    key_value = torch.cat([k, v], dim=1)
    for joined in ([torch.cat(inputs, dim=1)], [q, key_value]):
        joined_output, *joined_gradients = results(attend, joined, probe)
        assert torch.equal(joined_output, output)
        assert torch.equal(torch.cat(joined_gradients, dim=1), torch.cat(gradients, dim=1))


@pytest.mark.parametrize("dropout", [0.1, 0.9])
def test_dropped_fraction_is_as_requested_everywhere(dropout: float) -> None:
    """Check deviations from the expected number: of all weights, and per query and key."""
    masks = torch.stack(drawn_masks(7, padded(16), dropout)).float()
    for dims in ((0, 1, 2, 3), (0, 1, 2), (0, 1, 3)):
        count = torch.tensor([masks.shape[dim] for dim in dims]).prod()
        standard_error = (dropout * (1 - dropout) / count).sqrt()
        deviation = (masks.mean(dim=dims) - (1 - dropout)) / standard_error
        assert deviation.abs().max() < 5.0, dims
