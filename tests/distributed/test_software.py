"""Hosts whose code or packages differ from those of most."""

import pytest

from clap_ds.distributed.software import Versions, describe_differences

USUAL: Versions = {"commit": "dd3a5b2a", "code": "1a2b", "torch": "2.13.0"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # no git on a host
        ({"commit": None, "torch": "2.11.0"}, ["torch: 2.11.0, elsewhere 2.13.0"]),
        (
            {"commit": "cf15a666", "code": "3c4d"},
            ["commit: cf15a666, elsewhere dd3a5b2a", "code: 3c4d, elsewhere 1a2b"],
        ),
    ],
)
def test_hosts_that_differ_alike_are_named_together(changes, expected):
    by_rank: list[tuple[str, Versions | None]] = [("n1", USUAL), ("n1", None), ("n3", USUAL)]
    by_rank += [("n2", {**USUAL, **changes}), ("n4", {**USUAL, **changes}), ("n5", USUAL)]
    assert describe_differences(by_rank) == "; ".join(f"n2, n4: {text}" for text in expected)


def test_ranks_of_one_host_that_differ_are_named():
    by_rank = [("n1", USUAL), ("n2", USUAL), ("n1", {**USUAL, "code": "x"})]
    assert "n1 (rank 2): code" in describe_differences(by_rank)
