"""Test the CPU kernel for captions' attention against attention per segment."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from clap_ds.cpu_kernels.segment_attention import HEAD_DIMS, Segments, native_segment_attention
from tests.cpu_kernels.exactness import assert_equal, assert_within_roundings, numbers, results
from tests.kernels import each_implementation

pytestmark = each_implementation

HEADS = 3
SEED = 5
LENGTHS = torch.randint(1, 78, (12,), generator=torch.Generator().manual_seed(1)).tolist()


def by_segment(
    segments: Segments, dropout: float = 0.0
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return dropout(softmax(q kᵀ)) v per segment in the tensors' dtype, dropping the same weights
    as the kernel."""
    masks = masks_drawn(SEED, segments, dropout) if dropout else None

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        output = torch.zeros_like(q)
        scale = (q.shape[1] // HEADS) ** -0.5
        for i, (query, queries, key, keys) in enumerate(
            zip(*(places.tolist() for places in segments), strict=True)
        ):
            if not keys:
                continue
            rows = (q[query : query + queries], k[key : key + keys], v[key : key + keys])
            own_q, own_k, own_v = (
                tensor.unflatten(1, (HEADS, -1)).transpose(0, 1) for tensor in rows
            )
            weights = (own_q * scale @ own_k.transpose(1, 2)).softmax(dim=-1)
            if masks is not None:
                weights = weights * masks[i] / (1 - dropout)
            output[query : query + queries] = (weights @ own_v).transpose(0, 1).flatten(1)
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
    q, probe = (
        numbers(query_rows, columns, seed=seed, scale=scale) for seed, scale in ((0, 2.0), (1, 1.0))
    )
    return [q, numbers(key_rows, columns, seed=2), numbers(key_rows, columns, seed=3), probe]


def padded(
    batch: int, lengths: Tensor | None = None, first_only: bool = False, length: int = 77
) -> Segments:
    start = torch.arange(batch, dtype=torch.int32) * length
    return Segments.of_captions(
        start, torch.full_like(start, length), lengths, first_only=first_only
    )


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


def outside(segments: Segments, sizes: list[int]) -> list[Tensor]:
    """Return for q, k, v and the output (rows,) bool: True for rows outside of segments."""
    (q_start, q_rows), (k_start, k_rows) = segments[:2], segments[2:]
    starts = (q_start, k_start, k_start, q_start)
    counts = (q_rows, k_rows, k_rows, q_rows)
    places = [
        torch.arange(size) - start[:, None] for size, start in zip(sizes, starts, strict=True)
    ]
    return [
        ~((p >= 0) & (p < rows[:, None])).any(dim=0) for p, rows in zip(places, counts, strict=True)
    ]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_those_of_attention_by_definition(
    name: str, dropout: float
) -> None:
    """Compare with fp32 on the same bf16 values."""
    query_rows, key_rows, segments = CASES[name]
    *inputs, probe = draw(query_rows, key_rows)
    ours = attention(segments, dropout)
    assert_within_roundings(ours, by_segment(segments, dropout), inputs, probe)
    output, *gradients = results(ours, inputs, probe)
    for found, empty in zip(
        (*gradients, output), outside(segments, [*map(len, inputs), query_rows]), strict=True
    ):
        assert not found[empty].any()
    assert not output[by_segment(segments)(*inputs).abs().sum(dim=1) == 0].any(), (
        "there are no keys"
    )


def masks_drawn(seed: int, segments: Segments, dropout: float) -> list[Tensor]:
    """Return (A, queries, keys) bool per segment: the weights kept after `torch.manual_seed(seed)`.
    With equal scores and one-hot values, each key's weight appears in its own column, so a call
    shows as many keys as columns."""
    places = list(zip(*(each.tolist() for each in segments), strict=True))
    query_rows, key_rows = (
        int((start + rows).max()) for start, rows in (segments[:2], segments[2:])
    )
    columns = 128
    calls = -(-int(segments.key_rows.max()) // columns)
    q, k = (torch.zeros(rows, HEADS * columns).bfloat16() for rows in (query_rows, key_rows))
    weights = []
    for one_hot in torch.eye(calls * columns).split(columns, dim=1):
        v = torch.zeros(key_rows, HEADS * columns).bfloat16()
        for _, _, key, keys in places:
            v[key : key + keys] = one_hot[:keys].bfloat16().repeat(1, HEADS)
        torch.manual_seed(seed)
        output = native_segment_attention((q, k, v), HEADS, segments, 1.0, dropout)
        weights.append(output.float().unflatten(1, (HEADS, columns)).transpose(0, 1))
    masks = []
    for query, queries, _, keys in places:
        own = torch.cat(weights, dim=2)[:, query : query + queries, :keys] * keys * (1 - dropout)
        assert ((own == 0) | ((own - 1).abs() < 0.01)).all()
        masks.append(own != 0)
    return masks


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_head_dim_apart_and_side_by_side(head_dim: int, dropout: float) -> None:
    segments = packed([50, 20])
    *inputs, probe = draw(70, 70, head_dim)
    attend = attention(segments, dropout)
    apart = results(attend, inputs, probe)
    expected = results(by_segment(segments, dropout), [tensor.float() for tensor in inputs], probe)
    assert all(
        (ours - right).norm() < 0.006 * right.norm()
        for ours, right in zip(apart, expected, strict=True)
    )
    output, d_qkv = results(attend, [torch.cat(inputs, dim=1)], probe)
    assert_equal([output, *d_qkv.chunk(3, dim=1)], apart)
    output, d_q, d_kv = results(attend, [inputs[0], torch.cat(inputs[1:], dim=1)], probe)
    assert_equal([output, d_q, *d_kv.chunk(2, dim=1)], apart)


@pytest.mark.parametrize("dropout", [0.1, 0.9])
def test_dropped_are_as_many_as_asked_for_everywhere(dropout: float) -> None:
    """Check deviations from the expected number: of all weights, and per query, key and head."""
    masks = torch.stack(masks_drawn(7, padded(16), dropout)).float()
    for dims, most in (((0, 1, 2, 3), 4.0), ((0, 1, 2), 5.0), ((0, 1, 3), 5.0), ((2, 3), 5.0)):
        count = torch.tensor([masks.shape[dim] for dim in dims]).prod()
        deviation = (masks.mean(dim=dims) - (1 - dropout)) / (
            dropout * (1 - dropout) / count
        ).sqrt()
        assert deviation.abs().max() < most, dims
