"""Copies are the state as it was, in memory that stays the same."""

import torch

from clap_ds.training.host_copy import HostCopies


def test_a_copy_is_the_state_when_it_was_made_and_the_next_takes_its_place() -> None:
    copies, weights = HostCopies(), torch.nn.Parameter(torch.arange(10.0))
    state = {"weights": weights, "parts": [weights[3:], ("step", 5)]}
    assert copies.bytes_of(state) == 40  # a part that lies in it takes none
    first = copies.of(state)
    place = first["weights"].data_ptr()
    with torch.no_grad():
        weights += 1
    assert first["weights"].tolist() == list(range(10))
    assert first["parts"][0].tolist() == list(range(3, 10))
    second = copies.of(state)
    assert (second["weights"].tolist(), second["parts"][1]) == (list(range(1, 11)), ("step", 5))
    assert second["weights"].data_ptr() == place
    assert not second["weights"].requires_grad
