"""Test times of communication against hand calculations, and what of them a step waits for."""

from dataclasses import replace

import pytest

from clap_ds.planning.communication import (
    LINK_LATENCY_S,
    NETWORK_LATENCY_S,
    OCCUPIED,
    Cluster,
    Traffic,
    all_gather_s,
    all_reduce_s,
    communication_s,
)

ALONE = Cluster(1, 1, 400.0, 100.0)
NODE = Cluster(1, 4, 400.0, 100.0)
NODES = Cluster(8, 4, 400.0, 100.0)
GIGABYTE = 1e9
TRAFFIC = Traffic(
    gradient_bytes=GIGABYTE,
    last_gradient_bytes=0.0,
    last_backward_s=0.0,
    feature_bytes=GIGABYTE,
    num_gathers=1,
    text_forward_s=0.0,
    columns_s=0.0,
)


def test_all_reduce_sends_everything_twice_within_and_between_nodes():
    assert all_reduce_s(GIGABYTE, ALONE, 1.0) == 0.0
    # Three quarters to other GPUs at 400 GB/s, at half of the bandwidth.
    node_s = 2 * 0.75 / 200 + 6 * LINK_LATENCY_S
    assert all_reduce_s(GIGABYTE, NODE, 0.5) == pytest.approx(node_s)
    # Seven eighths to other nodes, by a tree of three levels.
    network_s = 2 * 0.875 / 50 + 6 * NETWORK_LATENCY_S
    assert all_reduce_s(GIGABYTE, NODES, 0.5) == pytest.approx(node_s + network_s)


def test_all_gather_takes_as_long_as_the_slower_of_links_and_network():
    assert all_gather_s(GIGABYTE, ALONE, 1.0) == 0.0
    assert all_gather_s(GIGABYTE, NODE, 1.0) == pytest.approx(3 / 400 + 3 * LINK_LATENCY_S)
    # The data of 28 other GPUs enters each node at 100 GB/s.
    latency_s = 24 * LINK_LATENCY_S + 7 * NETWORK_LATENCY_S
    assert all_gather_s(GIGABYTE, NODES, 1.0) == pytest.approx(28 / 100 + latency_s)
    slow_links = replace(NODES, link_gbytes_per_s=50.0)
    assert all_gather_s(GIGABYTE, slow_links, 1.0) == pytest.approx(31 / 50 + latency_s)


def test_a_step_waits_for_what_nothing_hides():
    share = 0.85
    gradients_s = all_reduce_s(GIGABYTE, NODES, share)
    features_s = all_gather_s(GIGABYTE, NODES, share)
    exposed_s = {
        "gradients": gradients_s,
        "audio features": features_s,
        "text features": features_s,
    }
    costs_s = communication_s(TRAFFIC, NODES, "middle")
    assert costs_s.pop("processors taken by NCCL") == 0.0
    # An all-reduce of no bytes has latencies only.
    assert costs_s == pytest.approx(exposed_s, abs=1e-4)

    hiding = replace(TRAFFIC, last_backward_s=9.0, text_forward_s=9.0, columns_s=0.1)
    costs_s = communication_s(hiding, NODES, "middle")
    occupied_s = OCCUPIED * (gradients_s + features_s + 0.1)
    assert costs_s.pop("processors taken by NCCL") == pytest.approx(occupied_s)
    exposed_s = {"gradients": 0.0, "audio features": 0.0, "text features": features_s - 0.1}
    assert costs_s == pytest.approx(exposed_s, abs=1e-4)

    last = replace(hiding, last_gradient_bytes=GIGABYTE)
    assert communication_s(last, NODES, "middle")["gradients"] == pytest.approx(
        gradients_s, abs=1e-4
    )


def test_each_micro_batch_gathers_its_features_and_one_gpu_sends_nothing():
    twice = communication_s(replace(TRAFFIC, num_gathers=2), NODES, "middle")
    once = communication_s(TRAFFIC, NODES, "middle")
    assert twice["text features"] == pytest.approx(2 * once["text features"])
    assert twice["gradients"] == once["gradients"]
    assert sum(communication_s(TRAFFIC, ALONE, "middle").values()) == 0.0
    slow = communication_s(TRAFFIC, NODES, "low")
    assert slow["gradients"] > once["gradients"]
