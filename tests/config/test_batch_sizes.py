"""Batch sizes equal DeepSpeed's, and are rejected if DeepSpeed rejects them."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime.config import DeepSpeedConfig

from clap_ds.config.batch_sizes import NAMES, BatchSizes
from clap_ds.config.settings import load_run
from clap_ds.utils.errors import UserError


def _by_deepspeed(given: tuple[Any, ...], world_size: int) -> tuple[int, ...] | None:
    config = object.__new__(DeepSpeedConfig)
    vars(config).update(zip(NAMES, given, strict=True), world_size=world_size)
    try:
        config._configure_train_batch_size()
    except AssertionError:
        return None
    return tuple(getattr(config, name) for name in NAMES)


def _by_us(given: tuple[Any, ...], world_size: int) -> tuple[int, ...] | None:
    try:
        sizes = BatchSizes.of(dict(zip(NAMES, given, strict=True)), world_size)
    except ValueError:
        return None
    return sizes.micro_batch, sizes.accumulation_steps, sizes.global_batch


def test_every_combination_is_read_as_deepspeed_reads_it() -> None:
    cases = list(
        itertools.product((None, 1, 3, 8), (None, 1, 2, 6), (None, 1, 6, 24, 64), (1, 2, 3, 4))
    )
    found = {(*given, ranks): _by_us(given, ranks) for *given, ranks in map(tuple, cases)}
    assert found == {
        (*given, ranks): _by_deepspeed(given, ranks) for *given, ranks in map(tuple, cases)
    }
    assert found[8, None, 64, 2] == (8, 4, 64)
    assert sum(sizes is None for sizes in found.values()) > 50


def test_what_is_wrong_is_one_line_with_its_numbers(write_run: Callable[..., Path]) -> None:
    for given, message in (
        ((8, 2, 64), "8 × 2 × 2 = 32, found 64"),
        (
            (None, 2, None),
            "train_micro_batch_size_per_gpu: missing; expected .* or train_batch_size",
        ),
        (("auto", None, 64), f'{NAMES[0]}: expected a whole number, at least 1, found "auto"'),
    ):
        with pytest.raises(UserError, match=message) as caught:
            load_run(write_run(**dict(zip(NAMES, given, strict=True))), 2)
        assert len(str(caught.value).splitlines()) == 1


def test_deepspeed_gets_what_was_worked_out(write_run: Callable[..., Path]) -> None:
    for given, expected in (
        ((None, None, 64), [16, 1, 64]),
        ((8, None, 64), [8, 2, 64]),
        ((None, 4, 64), [4, 4, 64]),
    ):
        path = write_run(**dict(zip(NAMES, given, strict=True)))
        assert [load_run(path, 4).deepspeed[name] for name in NAMES] == expected
        assert load_run(path).batch_sizes().global_batch == 64, "one rank if the number is unknown"
    agreeing = BatchSizes.of(dict(zip(NAMES, (8, 2, 64), strict=True)), None)
    assert agreeing.global_batch == 64, "four ranks are the fewest"
