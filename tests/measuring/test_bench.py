"""The bench command as users start it: under every launcher, on synthetic and real audio, and with what goes wrong."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.processes import ROOT, TIMEOUT_S, Command, run
from tests.ranks import free_port
from tests.training.training_commands import (
    RunningRanks,
    deepspeed_launcher,
    environment,
    make_sounds,
    shard_data,
    wait_until,
)

BENCH = "clap_ds/bench.py"
REFUSED = "DeepSpeed refuses the configuration"
WriteRun = Callable[..., Path]
pytestmark = pytest.mark.end_to_end


def _launcher(name: str) -> list[str]:
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port())]
    return {"deepspeed": deepspeed_launcher(), "torchrun": [sys.executable, *torchrun], "python": [sys.executable]}[
        name
    ]


def _bench(config: Path, launcher: str = "one rank", *options: str) -> subprocess.CompletedProcess[str]:
    """On one rank or two, forked here or, where the launcher is what is tested, by it."""
    arguments = [BENCH, "--deepspeed_config", str(config), *options]
    if launcher == "one rank":
        return run(arguments, env=environment())
    if launcher == "one GPU":
        seen = {name: value for name, value in environment().items() if name != "DS_ACCELERATOR"}
        return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, env=seen)
    if launcher == "two ranks":
        ranks = RunningRanks(config, 2, file=BENCH)
        codes = ranks.wait()
        outputs = ["".join(getattr(process, name) for process in ranks.processes) for name in ("stdout", "stderr")]
        return subprocess.CompletedProcess(arguments, max(codes), *outputs)
    command = [*_launcher(launcher), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment())


def _run_directory(config: Path) -> Path:
    (directory,) = (config.parent / "runs").iterdir()
    return directory


def _summary(config: Path) -> dict[str, Any]:
    return dict(json.loads((_run_directory(config) / "summary.json").read_text()))


@pytest.mark.parametrize(("launcher", "world_size"), [("deepspeed", 2), ("torchrun", 2), ("python", 1)])
def test_completes_under_every_launcher(write_run: WriteRun, launcher: str, world_size: int) -> None:
    config = write_run(log_level="info", steps_per_print=1)
    result = _bench(config, launcher)
    assert result.returncode == 0, result.stderr
    assert "samples/s" in result.stdout
    # What a launcher says is its own; the ranks say nothing but what the run is, how far it got and what came of it.
    said = [line for line in (result.stdout + result.stderr).splitlines() if line.strip()]
    assert launcher == "deepspeed" or said[0].startswith("run directory: "), said[:3]
    assert not any("WARNING" in line for line in said if launcher != "deepspeed"), said

    summary = _summary(config)
    assert summary["state"] == "completed"
    assert (summary["world_size"], summary["num_nodes"], summary["global_batch"]) == (world_size, 1, 4 * world_size)
    windows = summary["samples_per_s_per_gpu"]["windows"]
    assert len(windows) == 2
    assert summary["samples_per_s"] == pytest.approx(world_size * sum(windows) / 2)

    directory = _run_directory(config)
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line["phase"] for line in lines] == ["warmup"] + ["window"] * 4
    assert all(line["slowest_rank_time_s"] >= line["time_s"] > 0 for line in lines)
    # The rate follows from the step times on record, up to what lies between the last step and the window's end, which may be
    # long on a busy machine. Ranks held up in different steps make the slowest steps together longer than any rank's window.
    shortest_s, longest_s = (sum(line[name] for line in lines[1:3]) for name in ("time_s", "slowest_rank_time_s"))
    assert 0.55 * 8 / longest_s <= windows[0] <= 1.01 * 8 / shortest_s
    assert "SamplesPerSec=" in (directory / "rank0.log").read_text()
    environment = json.loads((directory / "environment.json").read_text())
    assert environment["gpus_per_node"] == [world_size]
    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    assert {"bench/loss", "bench/samples_per_s"} <= set(events.Tags()["scalars"])


def test_accumulation_counts_all_micro_batches(write_run: WriteRun) -> None:
    config = write_run(gradient_accumulation_steps=3)
    assert _bench(config).returncode == 0
    summary = _summary(config)
    lines = [json.loads(line) for line in (_run_directory(config) / "metrics.jsonl").read_text().splitlines()]
    assert summary["global_batch"] == 12
    rate = 24 / sum(line["time_s"] for line in lines[1:3])  # a third of it, were one micro-batch counted
    assert 0.4 * rate < summary["samples_per_s_per_gpu"]["windows"][0] < 1.01 * rate


@pytest.mark.parametrize(
    ("launcher", "changes", "message"),
    [
        ("deepspeed", {"clap": {"bench": {"windws": 3}}}, "clap.bench.windws: no such field; did you mean 'windows'?"),
        ("python", {"clap": {"bench": {"windws": 3}}}, "clap.bench.windws: no such field; did you mean 'windows'?"),
        ("two ranks", {"bf16": {"enabled": "perhaps"}}, REFUSED),
        ("two ranks", {"optimizer": {"type": "AdamW", "params": {"learning_rate": 1}}}, REFUSED),
    ],
)
def test_bad_settings_give_one_message_and_exit_code_2(
    write_run: WriteRun, launcher: str, changes: dict[str, Any], message: str
) -> None:
    config = write_run(**changes)
    result = _bench(config, launcher)
    output = result.stdout + result.stderr
    assert result.returncode == 2, output
    assert output.count(message) == 1, output
    assert output.count("error: ") == 1, output
    assert "Traceback" not in output


def test_world_size_other_than_the_hostfile_promises(write_run: WriteRun, tmp_path: Path) -> None:
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("node1 slots=4\n")
    result = _bench(write_run(), "deepspeed", "--hostfile", str(hostfile))
    assert result.returncode == 2
    assert "promises 4 ranks on 1 hosts, the launcher started 2" in result.stderr


def test_infinite_loss_stops_all_ranks_with_the_step(write_run: WriteRun) -> None:
    config = write_run(optimizer={"type": "AdamW", "params": {"lr": 1e30, "torch_adam": True}}, bf16={"enabled": False})
    result = _bench(config, "two ranks")
    assert result.returncode == 1
    assert "the loss is NaN or infinite at step 2" in result.stderr
    assert "Traceback" not in result.stderr
    summary = _summary(config)
    assert summary["state"] == "failed"
    assert "step 2" in summary["error"]


@pytest.mark.parametrize(
    ("launcher", "micro_batch"), [("one rank", 10**12), pytest.param("one GPU", 10**7, marks=pytest.mark.gpu)]
)
def test_exhausted_memory_is_recorded_with_the_micro_batch(
    write_run: WriteRun, launcher: str, micro_batch: int
) -> None:
    config = write_run(train_micro_batch_size_per_gpu=micro_batch)
    assert _bench(config, launcher).returncode == 1
    assert _summary(config)["state"] == "out_of_memory"
    assert f"micro-batch {micro_batch}" in _summary(config)["error"]


@pytest.mark.parametrize(("number", "state"), [(signal.SIGTERM, "terminated"), (signal.SIGUSR1, "timeout")])
def test_signal_ends_the_run_with_its_state(write_run: WriteRun, number: signal.Signals, state: str) -> None:
    config = write_run(clap={"bench": {"warmup_steps": 100000}})
    process = Command([BENCH, "--deepspeed_config", str(config)], env=environment())
    wait_until(lambda: any(config.parent.glob("runs/*/metrics.jsonl")) or process.poll() is not None)
    assert _summary(config)["state"] == "running"
    process.send_signal(number)
    assert process.wait(timeout=180) == 128 + number
    assert _summary(config)["state"] == state


@pytest.fixture(scope="module")
def sounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of real encoded audio with captions and their tokenizer."""
    folder = tmp_path_factory.mktemp("sounds") / "data"
    return make_sounds(folder, "--clips", "24", "--shards", "4", "--seconds", "1-2")


def test_trains_on_real_audio(write_run: WriteRun, sounds: Path) -> None:
    config = write_run(clap={"data": shard_data(sounds)})
    result = _bench(config, "two ranks")
    assert result.returncode == 0, result.stderr
    summary = _summary(config)
    assert summary["state"] == "completed"
    assert summary["data"]["num_broken_items"] == 0


def test_shards_that_are_all_broken_end_the_run(write_run: WriteRun, sounds: Path, tmp_path: Path) -> None:
    broken = [tmp_path / f"broken-{number}.tar" for number in range(2)]
    for path in broken:
        path.write_bytes(b"this is not a tar file" * 100)
    data = shard_data(sounds) | {"shards": list(map(str, broken))}
    result = _bench(write_run(clap={"data": data}), "two ranks")
    assert result.returncode in (1, 2)
    assert "broken-" in result.stderr
    assert "Traceback" not in result.stderr
