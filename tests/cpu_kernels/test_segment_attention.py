"""Test the CPU kernel for captions' attention against PyTorch's attention per segment."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from clap_ds.cpu_kernels.segment_attention import HEAD_DIMS, Segments, native_segment_attention
from tests.cpu_kernels.exactness import assert_within_roundings, numbers, results
from tests.kernels import each_implementation

pytestmark = each_implementation

HEADS = 3
LENGTHS = torch.randint(1, 78, (12,), generator=torch.Generator().manual_seed(1)).tolist()
SOME = torch.tensor([77, 1, 40, 0, 16, 33]).int()
GAPS = Segments(*torch.tensor([[3, 20, 40], [5, 0, 7], [2, 30, 70], [20, 33, 18]]).int())


def padded(batch: int, lengths: Tensor | None = None, first_only: bool = False) -> Segments:
    start = torch.arange(batch, dtype=torch.int32) * 77
    return Segments.of_captions(start, torch.full_like(start, 77), lengths, first_only=first_only)


def packed(lengths: list[int], first_only: bool = False) -> Segments:
    rows = torch.tensor(lengths, dtype=torch.int32)
    return Segments.of_captions((rows.cumsum(0) - rows).int(), rows, first_only=first_only)


# rows of queries, rows of keys
CASES = {
    "padded, of many lengths": (6 * 77, 6 * 77, padded(6, SOME)),
    "padded, first only": (6, 6 * 77, padded(6, SOME, True)),
    "packed, first only": (12, sum(LENGTHS), packed(LENGTHS, True)),
    "514 tokens": (514 + 17, 514 + 17, packed([514, 17])),
    "gaps everywhere": (50, 90, GAPS),
}


def by_segment(segments: Segments) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return attention of each segment in the tensors' dtype; zeros elsewhere."""

    def attend(*qkv: Tensor) -> Tensor:
        output = torch.zeros_like(qkv[0])
        for query, num_queries, key, num_keys in torch.stack(segments).T.tolist():
            queries = slice(query, query + num_queries)
            keys = slice(key, key + num_keys)
            rows = [tensor[part] for tensor, part in zip(qkv, (queries, keys, keys), strict=True)]
            heads = [tensor.unflatten(1, (HEADS, -1)).transpose(0, 1) for tensor in rows]
            if num_queries and num_keys:
                mixed = F.scaled_dot_product_attention(*heads)
                output[queries] = mixed.transpose(0, 1).flatten(1)
        return output

    return attend


def attention(segments: Segments, dropout: float = 0.0) -> Callable[..., Tensor]:
    """Return the kernel's attention for q, k and v in any number of tensors."""

    def attend(*tensors: Tensor) -> Tensor:
        torch.manual_seed(5)
        head_dim = sum(tensor.shape[1] for tensor in tensors) // 3 // HEADS
        return native_segment_attention(tensors, HEADS, segments, head_dim**-0.5, dropout)

    return attend


def draw(query_rows: int, key_rows: int, head_dim: int = 64) -> list[Tensor]:
    """Draw q, k, v and the output's gradient in bf16, with weights far from uniform."""
    columns = HEADS * head_dim
    q = numbers(query_rows, columns, seed=0, scale=2.0)
    k, v = (numbers(key_rows, columns, seed=seed) for seed in (2, 3))
    return [q, k, v, numbers(query_rows, columns, seed=1)]


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_equal_pytorchs(name):
    query_rows, key_rows, segments = CASES[name]
    *inputs, probe = draw(query_rows, key_rows)
    assert_within_roundings(attention(segments), by_segment(segments), inputs, probe)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_tensors_apart_and_side_by_side_are_equal(head_dim):
    segments = packed([50, 20])
    *inputs, probe = draw(70, 70, head_dim)
    attend = attention(segments)
    assert_within_roundings(attend, by_segment(segments), inputs, probe)
    output, *gradients = results(attend, inputs, probe)
    q, k, v = inputs
    for joined in ([torch.cat(inputs, dim=1)], [q, torch.cat([k, v], dim=1)]):
        joined_output, *joined_gradients = results(attend, joined, probe)
        assert torch.equal(joined_output, output)
        assert torch.equal(torch.cat(joined_gradients, dim=1), torch.cat(gradients, dim=1))


@pytest.mark.parametrize("dropout", [0.1, 0.9])
def test_dropout_drops_its_fraction_of_weights_alike_in_both_passes(dropout):
    """With equal scores and one-hot values, each key's weight appears in its own column."""
    kernel = attention(padded(16), dropout)
    zeros = torch.zeros(16 * 77, HEADS * 96).bfloat16()
    one_hot = torch.eye(77, 96).bfloat16().repeat(16, HEADS)
    weights = kernel(zeros, zeros, one_hot).float().unflatten(0, (16, 77))
    masks = weights.unflatten(2, (HEADS, 96)).transpose(1, 2)[..., :77] != 0
    # Of each query's weights, and of each key's.
    for dim in (2, 3):
        fractions = masks.float().mean(dim=(0, 1, dim))
        standard_error = (dropout * (1 - dropout) / (16 * HEADS * 77)) ** 0.5
        assert (fractions - (1 - dropout)).abs().max() < 5 * standard_error

    def masked(*qkv: Tensor) -> Tensor:
        q, k, v = (rows.view(16, 77, HEADS, 96).transpose(1, 2) for rows in qkv)
        weights = (q @ k.transpose(2, 3) * 96**-0.5).softmax(dim=-1) * masks / (1 - dropout)
        return (weights @ v).transpose(1, 2).reshape(16 * 77, -1)

    *inputs, probe = draw(16 * 77, 16 * 77, 96)
    assert_within_roundings(kernel, masked, inputs, probe)
