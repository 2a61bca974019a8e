"""Batch sizes equal DeepSpeed's, and are rejected if DeepSpeed rejects them."""

import itertools
from typing import Any

import pytest
from deepspeed.runtime.config import DeepSpeedConfig

from clap_ds.config.batch_sizes import NAMES, BatchSizes
from clap_ds.config.settings import load_run
from clap_ds.utils.errors import UserError


def by_deepspeed(numbers: tuple[Any, ...], world_size: int) -> tuple[int, ...] | None:
    """Return DeepSpeed's sizes, or None if it rejects the numbers."""
    config = object.__new__(DeepSpeedConfig)
    vars(config).update(zip(NAMES, numbers, strict=True), world_size=world_size)
    try:
        config._configure_train_batch_size()
    except AssertionError:
        return None
    return tuple(getattr(config, name) for name in NAMES)


def by_us(numbers: tuple[Any, ...], world_size: int | None) -> tuple[int, ...] | None:
    try:
        sizes = BatchSizes.from_config(dict(zip(NAMES, numbers, strict=True)), world_size)
    except ValueError:
        return None
    return sizes.micro_batch, sizes.gradient_accumulation_steps, sizes.global_batch


def test_batch_sizes_of_any_numbers_equal_deepspeeds():
    micro_batches = (None, 1, 3, 8)
    accumulation_steps = (None, 1, 2, 6)
    global_batches = (None, 1, 6, 24, 64)
    for numbers in itertools.product(micro_batches, accumulation_steps, global_batches):
        for num_ranks in (1, 2, 3, 4):
            expected = by_deepspeed(numbers, num_ranks)
            assert by_us(numbers, num_ranks) == expected, (numbers, num_ranks)
    assert by_us((8, None, 64), 2) == (8, 4, 64)


def test_batch_sizes_without_world_size_are_of_the_fewest_ranks():
    assert by_us((8, 2, 64), None) == (8, 2, 64)
    assert by_us((None, None, 64), None) == (64, 1, 64)
    assert by_us((8, None, None), None) == (8, 1, 8)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((8, 2, 64), "8 × 2 × 2 = 32, found 64"),
        ((None, 2, None), "train_micro_batch_size_per_gpu: missing; .* or train_batch_size"),
        ((True, None, 64), f"{NAMES[0]}: expected a whole number, at least 1, found true"),
    ],
)
def test_batch_sizes_that_contradict_are_refused_in_a_line(numbers, message, write_run):
    with pytest.raises(UserError, match=message):
        load_run(write_run(**dict(zip(NAMES, numbers, strict=True))), 2)


@pytest.mark.parametrize(
    ("numbers", "filled"), [((None, 4, 64), [4, 4, 64]), ((8, None, None), [8, 1, None])]
)
def test_run_with_world_size_has_all_sizes_for_deepspeed(numbers, filled, write_run):
    run = load_run(write_run(**dict(zip(NAMES, numbers, strict=True))), 4)
    assert [run.deepspeed.get(name) for name in NAMES] == filled
