"""The command: that its numbers hang together, what it prints, and what it refuses."""

import json
import re
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clap_ds import plan
from clap_ds.config.errors import UserError
from clap_ds.config.model import load_preset
from clap_ds.config.settings import load_run
from clap_ds.flop_count.analytic import TextLengths, backward_flops, forward_flops
from clap_ds.planning.memory import GIB
from clap_ds.planning.step import trace_loss

WriteRun = Callable[..., Path]


@pytest.fixture
def planned(write_run: WriteRun, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    def run(options: str, **changes: Any) -> Any:
        plan.main(["--deepspeed_config", str(write_run(**changes)), "--gpu", "h100-sxm", "--json", *options.split()])
        return json.loads(capsys.readouterr().out)

    return run


def test_a_plan_hangs_together(planned: Callable[..., Any]) -> None:
    report = planned("--nodes 4 1 --gpus_per_node 2 --find_micro_batch --samples 1e6", gradient_accumulation_steps=None)
    assert report["predicted"] is report["fits"] is True
    assert report["peak_memory_gib"] == pytest.approx(sum(report["memory_gib"].values()))
    rates, step_s = report["samples_per_s_per_gpu"], report["step_s"]
    assert rates["low"] < rates["middle"] < rates["high"]
    assert sum(each["middle"] for each in step_s.values()) == pytest.approx(2 * step_s["step"]["middle"])
    first, last = report["scales"]
    assert (first["nodes"], first["gpus"], first["efficiency_percent"]) == (1, 2, pytest.approx(100))
    assert (last["nodes"], last["gpus"]) == (4, 8)
    by_nodes = [each["samples_per_s_per_gpu"]["middle"] for each in (first, last)]
    assert last["efficiency_percent"] == pytest.approx(100 * by_nodes[1] / by_nodes[0])
    assert last["efficiency_percent_range"][0] < last["efficiency_percent"] < last["efficiency_percent_range"][1] < 100
    assert last["gpu_hours"] == pytest.approx(8 * last["hours"]) == pytest.approx(1e6 / by_nodes[1] / 3600)
    assert report["largest_micro_batch"] % 8 == 0
    printed = re.sub(" +", " ", plan.render(report))
    assert printed.startswith("## Predicted, nothing measured: micro on h100-sxm, bf16, micro-batch 4, 16 text tokens")
    for part, seconds in step_s.items():
        assert f"| {part} | {' | '.join(f'{1000 * each:.1f}' for each in seconds.values())} |" in printed
    for each, rate in zip(report["scales"], by_nodes, strict=True):
        assert f"| {each['nodes']} | {each['gpus']} | {rate:,.0f} | {each['efficiency_percent']:.1f} |" in printed


def test_accumulation_and_scale_count_where_they_should(planned: Callable[..., Any], write_run: WriteRun) -> None:
    plain, many = (planned("--gpus_per_node 1 --nodes 1 64", gradient_accumulation_steps=number) for number in (1, 4))
    config, lengths = load_preset("micro"), TextLengths.fixed(16)
    done = 4 * 4 * (forward_flops(config, lengths, "model") + backward_flops(config, lengths)) / 1e12
    assert many["tflop"] == pytest.approx(4 * plain["tflop"])
    assert done < many["tflop"] < 1.1 * done  # fused attention computes its scores again; and the loss
    assert many["parameters"] == plain["parameters"] == 64_601
    audio, update = (
        [report["step_s"][part]["middle"] for report in (many, plain)] for part in ("audio forward", "optimizer")
    )
    assert (audio[0], update[0]) == pytest.approx((4 * audio[1], update[1]), rel=0.1)
    for report, samples in ((plain, 4), (many, 16)):
        for case, rate in report["samples_per_s_per_gpu"].items():
            assert rate == pytest.approx(samples / report["step_s"]["step"][case])
            assert report["scales"][0]["samples_per_s_per_gpu"][case] == pytest.approx(rate, rel=0.5)
    alone, run = planned("--gpus_per_node 1 --nodes 1"), load_run(write_run())
    libraries = "context and libraries (assumed)"
    assert plain["memory_gib"][libraries] > alone["memory_gib"][libraries]
    more = plain["memory_gib"]["loss"] - alone["memory_gib"].get("loss", 0.0)
    assert more * GIB == pytest.approx(trace_loss(run, 4, 64).peak_bytes - trace_loss(run, 4, 1).peak_bytes)


def test_the_range_of_an_efficiency_covers_each_step_with_each_growth() -> None:
    one, many = plan._scales(
        616, {"low": 0.3, "middle": 0.2, "high": 0.1}, [1, 128], Namespace(gpus_per_node=4, samples=None)
    )
    ends = one["efficiency_percent_range"]
    assert ends == [100.0, 100.0]
    # The published step of 616 samples grows from 0.9848 s to 1.1260 s at 128 nodes, by a + b·√n.
    low, high = many["efficiency_percent_range"]
    assert low == pytest.approx(100 * 0.1 / (0.1 + 1.1260 - 0.9848), abs=0.5)  # the fastest step and all of the seconds
    assert high == pytest.approx(87.5, abs=0.5)  # any step that grows by as large a share
    assert low < many["efficiency_percent"] < high


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--gpu h100-sxn", "did you mean 'h100-sxm'"),
        ("--text_tokens 100", "positions for 64"),
        ("--nodes 1 2", "train_batch_size"),
    ],
)
def test_mistakes_are_said(write_run: WriteRun, options: str, said: str) -> None:
    whole = {"train_batch_size": 32, "gradient_accumulation_steps": None}  # on four GPUs two passes a step
    with pytest.raises(UserError, match=said):
        plan.main(["--deepspeed_config", str(write_run(**whole)), "--gpu", "h200", *options.split()])
