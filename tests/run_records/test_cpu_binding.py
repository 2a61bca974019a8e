import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from clap_ds.run_records.cpu_binding import (
    RankPlace,
    describe_places,
    find_wrong_binding,
    format_ranges,
    numa_node_of_gpu,
    numa_nodes,
    place_of_rank,
)


def bound_ranks(*cores: range, host: str = "n1", host_cores: int = 16) -> list[RankPlace]:
    return [
        RankPlace(
            host=host, device_name="GPU", cores=[*own], host_cores=host_cores, numa_nodes=[0], device_numa_node=None
        )
        for own in cores
    ]


@pytest.mark.parametrize(
    ("places", "num_workers"),
    [
        (bound_ranks(range(2), range(2), host_cores=2), 8),  # a laptop without binding
        (bound_ranks(range(8), range(8, 16)), 7),
        (bound_ranks(range(8), range(8)), 3),  # a job's cores, without binding
        (bound_ranks(range(1)) + bound_ranks(range(1), host="n2"), 0),
    ],
)
def test_own_cores_or_all_cores_are_no_problem(places: list[RankPlace], num_workers: int) -> None:
    assert find_wrong_binding(places, num_workers) is None


@pytest.mark.parametrize(
    ("places", "num_workers", "words"),
    [
        (bound_ranks(range(2), range(2)), 1, ["rank 0 may use 2 of 16 cores (0-1)", "2 ranks share", "expected 2"]),
        (bound_ranks(range(8), range(8, 12)), 4, ["rank 1 may use 4 of 16 cores (8-11)", "expected 5"]),
        (bound_ranks(range(8), range(4, 12)), 0, ["rank 0 may use 8", "shares some"]),
        (bound_ranks(range(16), range(4)), 0, ["rank 1 may use 4", "shares some"]),
        (bound_ranks(range(16)) + bound_ranks(range(2), host="n2"), 2, ["n2: rank 1 may use 2"]),
        (bound_ranks(range(1)) + bound_ranks(range(1), host="n2"), 1, ["n1: rank 0", "1 other host(s)"]),
    ],
)
def test_shared_or_too_few_cores_are_named(places: list[RankPlace], num_workers: int, words: list[str]) -> None:
    problem = find_wrong_binding(places, num_workers)
    assert problem is not None
    assert [word for word in words if word not in problem] == []


def test_cores_of_a_rank_are_recorded_as_ranges() -> None:
    place = place_of_rank("n1", "CPU")
    assert place["cores"] == sorted(os.sched_getaffinity(0))
    (described,) = describe_places(bound_ranks([0, 1, 2, 8]))  # type: ignore[arg-type]
    assert described == {"host": "n1", "cores": "0-2,8", "numa_nodes": "0", "device_numa_node": None}
    assert format_ranges([]) == ""


def test_numa_nodes_are_the_kernels(tmp_path: Path) -> None:
    for node, cores in ((0, (0, 1)), (1, (2, 3)), (10, (4,))):
        for core in cores:
            (tmp_path / f"devices/system/node/node{node}/cpu{core}").mkdir(parents=True)
    assert [numa_nodes(cores, tmp_path) for cores in ([0], [1, 2], [4], [])] == [[0], [0, 1], [10], []]
    device = tmp_path / "bus/pci/devices/0000:3b:00.0"
    device.mkdir(parents=True)
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    expected: dict[str, int | None] = {"1\n": 1, "-1\n": None}
    for text, node in expected.items():
        (device / "numa_node").write_text(text)
        assert numa_node_of_gpu(gpu, tmp_path) == node
    assert numa_node_of_gpu(SimpleNamespace(), tmp_path) is None
