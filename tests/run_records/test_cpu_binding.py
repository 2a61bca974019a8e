from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from clap_ds.run_records.cpu_binding import (
    RankPlace,
    describe_places,
    find_wrong_binding,
    numa_node_of_gpu,
    numa_nodes,
)


def bound_ranks(*cores: Iterable[int], host: str = "n1", host_cores: int = 16) -> list[RankPlace]:
    fields: Any = {
        "host": host,
        "device_name": "GPU",
        "host_cores": host_cores,
        "numa_nodes": [0],
        "device_numa_node": None,
    }
    return [RankPlace(cores=[*rank_cores], **fields) for rank_cores in cores]


@pytest.mark.parametrize(
    ("places", "num_workers", "problem"),
    [
        # a laptop without binding
        (bound_ranks(range(2), range(2), host_cores=2), 8, None),
        # a job's cores, without binding
        (bound_ranks(range(8), range(8)), 3, None),
        (bound_ranks(range(2), range(2)), 1, "rank 0 may use 2 of 16 cores (0-1), which 2 rank"),
        (bound_ranks(range(8), range(4, 12)), 0, "shares some"),
        (
            bound_ranks(range(1)) + bound_ranks(range(1), host="n2"),
            1,
            "1 other host(s)",
        ),
    ],
)
def test_binding_to_shared_or_too_few_cores_is_described(places, num_workers, problem):
    message = find_wrong_binding(places, num_workers)
    assert (message is None) == (problem is None)
    assert str(problem) in str(message)


def test_rank_place_has_cores_as_ranges():
    (described,) = describe_places(bound_ranks([0, 1, 2, 8]))
    assert described["cores"] == "0-2,8"


def test_numa_nodes_are_those_with_the_cores(tmp_path):
    for core, node in enumerate((0, 0, 1, 10)):
        (tmp_path / f"devices/system/cpu/cpu{core}/node{node}").mkdir(parents=True)
    assert numa_nodes([1, 2, 3], tmp_path) == [0, 1, 10]


def test_numa_node_of_gpu_is_read_by_its_address(tmp_path):
    device = tmp_path / "bus/pci/devices/0000:3b:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    assert numa_node_of_gpu(gpu, tmp_path) == 1
    assert numa_node_of_gpu(SimpleNamespace(), tmp_path) is None
