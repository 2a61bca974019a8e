"""The one way to measured numbers: what it makes of directories, logs, tables, gaps and rubbish."""

import gzip
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median
from unittest.mock import Mock

import pytest

from clap_ds.analysis.runs import parse_options, read_runs
from clap_ds.config.errors import UserError
from tests.analysis.samples import DATA, ROOT, TINY, command, given, record, running_log, write

LOG = DATA / "deepspeed_2ranks.log"


def test_counts_not_in_the_log_are_asked_for_by_option_name(tmp_path: Path) -> None:
    log = write(tmp_path / "bare.log", running_log([1.0] * 20, batch=64))
    with pytest.raises(UserError, match=r"bare\.log.*--nodes.*--gpus"):
        read_runs([log], given())
    with pytest.raises(UserError, match="2 GPUs on 4 nodes"):
        read_runs([log], given(nodes=4, gpus=2))
    for options in (given(nodes=2, gpus_per_node=4), given(gpus=8, gpus_per_node=4), given(gpus=8, nodes=2)):
        (run,) = read_runs([log], options)
        assert (run.nodes, run.gpus, run.rate, run.engine_samples_per_s_per_gpu) == (2, 8, 8.0, 8.0)
        assert (run.interval, set(run.windows)) == ((8.0, 8.0), {8.0})
    (run,) = read_runs([log], given(nodes=2, gpus=8, model="micro", micro_batch=8, peak_tflops=10.0))
    assert (run.nodes, run.gpus, run.rate, run.step_time_s) == (2, 8, pytest.approx(8.0), pytest.approx(1.0))
    assert (run.model, run.batch_per_gpu, run.peak_tflops) == ("micro", 8, 10.0)


def test_the_input_is_believed_before_the_options() -> None:
    (run,) = read_runs([LOG], given(nodes=7, gpus=28, micro_batch=1))
    assert (run.nodes, run.gpus, run.batch_per_gpu) == (1, 2, 64)
    assert run.step_time_s == pytest.approx(64 / median(run.windows))
    (run,) = read_runs([DATA / "deepspeed_1rank_accumulating.log"], given())
    assert (run.batch_per_gpu, run.micro_batch) == (128, 64)
    assert read_runs([TINY], given(model="micro"))[0].model == "htsat_tiny_roberta_base"


ENGINE = "world_size ................... {}\n"


def test_logs_of_srun_state_their_gpus_and_are_no_repeats_of_one_node_count(tmp_path: Path) -> None:
    """Without launcher lines the engine's configuration is all there is."""
    for gpus in (8, 16, 32):
        write(tmp_path / f"slurm-{gpus}.out", ENGINE.format(gpus) + running_log([1.0] * 20, batch=gpus))
    logs = sorted(tmp_path.iterdir())
    with pytest.raises(
        UserError, match="--nodes 2: inputs that don't state their nodes have 8, 16 and 32 GPUs; give --gpus_per"
    ):
        read_runs(logs, given(nodes=2))
    with pytest.raises(UserError, match="8 GPUs are no multiple of --gpus_per_node 3"):
        read_runs(logs[2:], given(gpus_per_node=3))
    found = read_runs([tmp_path], given(gpus_per_node=4))  # a folder of logs
    assert sorted((run.nodes, run.gpus, run.rate) for run in found) == [(2, 8, 1.0), (4, 16, 1.0), (8, 32, 1.0)]


@pytest.mark.parametrize(
    ("name", "nodes"),
    [("n4.log", 4), ("4nodes.log", 4), ("tiny_nodes-4.out", 4), ("nodes=04/slurm-9.out", 4), ("n2_run/x.log", 2),
     ("n2/n4.log", 4), ("node4.log", 0), ("n2-n4.log", 0), ("slurm-4.out", 0), ("n3.log", 3)],
)  # fmt: skip
def test_nodes_are_by_the_name_only_where_it_says_one_count(tmp_path: Path, name: str, nodes: int) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    log = write(tmp_path / name, ENGINE.format(8) + running_log([1.0] * 20))
    if nodes:
        (run,) = read_runs([log], given())
        assert (run.nodes, run.gpus) == (nodes, 8)
        assert f"{nodes} nodes by its name" in run.notes
    else:
        with pytest.raises(UserError, match="doesn't state the number of nodes"):
            read_runs([log], given())
    (run,) = read_runs([log], given(nodes=1))
    assert (run.nodes, "by its name" in run.notes) == (1, False)
    stated = write(tmp_path / "slurm-5.out", "SLURM_JOB_NUM_NODES=2\n" + log.read_text())
    assert read_runs([stated], given())[0].nodes == 2


def test_nodes_by_the_names_give_gpus_and_one_count_for_all_is_refused(tmp_path: Path) -> None:
    logs = [write(tmp_path / f"n{nodes}.log", running_log([1.0] * 20, batch=8 * nodes)) for nodes in (2, 4, 8)]
    runs = read_runs(logs, given(gpus_per_node=4))
    assert [(run.nodes, run.gpus, run.rate) for run in runs] == [(2, 8, 2.0), (4, 16, 2.0), (8, 32, 2.0)]
    assert "2 nodes by its name" in runs[0].notes
    for option, lack in (({"gpus": 8}, "--gpus 8: .* their GPUs"), ({"nodes": 2}, "--nodes 2: .* their nodes")):
        with pytest.raises(UserError, match=f"{lack} have 2, 4 and 8 nodes; give --gpus_per_node instead"):
            read_runs(logs, given(**option))


def test_gpus_by_the_name_divide_what_the_log_tells_of_all(tmp_path: Path) -> None:
    log = write(tmp_path / "2nodes_8gpus.log", running_log([1.0] * 20, batch=64))
    (run,) = read_runs([log], given())
    assert (run.nodes, run.gpus, run.rate, run.interval) == (2, 8, 8.0, (8.0, 8.0))
    assert "8 GPUs by its name; 2 nodes by its name" in run.notes


def test_files_of_a_run_directory_stand_for_it_and_its_log_counts_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runs" / "tiny-20261120T000000Z"
    shutil.copytree(DATA / "record_2ranks", folder)
    write(folder / "rank0.log", "hello\n")
    for names in (["metrics.jsonl"], ["rank0.log"], ["summary.json", "metrics.jsonl"]):
        (run,) = read_runs([folder / name for name in names], given())
        assert (run.source, run.gpus) == (str(folder), 2)
    (run,) = read_runs([folder], given())
    title = "micro on 2 × Xeon, 1 node, bf16, micro-batch 4, 77 text tokens"
    table = f"run directory: my runs/{folder.name}\n{title}\n┌──┬──┐\n│ samples/s/rank │ {{:.2f}} │\n└──┴──┘\n"
    log = write(tmp_path / "slurm-1.out", table.format(run.rate))
    capsys.readouterr()
    for inputs in ([log, folder], [tmp_path]):
        assert [run.source for run in read_runs(inputs, given())] == [str(folder)]
        assert capsys.readouterr().err == f"note: the same run, counted once: {folder}, {log}\n"
    other = write(tmp_path / "other.out", table.format(3.0))  # of another machine's folder of this name
    assert len(read_runs([other, folder], given(nodes=1))) == 2
    write(folder / "rank0.log", running_log([1.0] * 20, batch=64))
    lacking = json.loads((folder / "summary.json").read_text()) | {"deepspeed_samples_per_s": None}
    write(folder / "summary.json", json.dumps(lacking))
    assert read_runs([folder], given())[0].engine_samples_per_s_per_gpu == 32.0


@pytest.mark.parametrize("name", ["HTSAT-tiny-Roberta-base", "htsat_TINY_roberta_base", "CLAP-HTSAT-tiny-Roberta-base"])
def test_a_models_published_name_is_its_preset(tmp_path: Path, name: str) -> None:
    log = write(tmp_path / "x.log", running_log([1.0] * 20))
    table = write(tmp_path / "t.csv", f"model,nodes,gpus,samples/s/GPU\n{name},1,1,64\n")
    for run in read_runs([log, table], given(nodes=1, gpus=1, model=name)):
        assert run.model == "htsat_tiny_roberta_base"
    assert read_runs([log], given(nodes=1, gpus=1, model="HTSAT-huge"))[0].model == "HTSAT-huge"


@pytest.mark.parametrize(("name", "near"), [("HTSAT-tiny-Roberta-bse", "htsat_tiny_roberta_base"), ("HTSAT-huge", "")])
def test_a_model_that_is_nearly_a_preset_is_doubted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, near: str
) -> None:
    found = []
    command(monkeypatch, lambda: found.append(parse_options("", "--model")), "--model", name)
    assert found[0].model == name
    said = f"warning: --model {name}: not a preset; did you mean '{near}'?\n" if near else ""
    assert capsys.readouterr().err == said


def test_an_input_without_a_run_is_named_and_the_rest_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for nodes in (1, 2):
        record(tmp_path / f"run-{nodes}", [], state="failed", num_nodes=nodes, world_size=4 * nodes)
    (tmp_path / "elsewhere" / "empty").mkdir(parents=True)
    assert [run.gpus for run in read_runs([tmp_path], given())] == [4, 8]
    inputs = [write(tmp_path / "bad.log", "hello"), tmp_path / "gone", tmp_path / "elsewhere" / "empty"]
    reasons = (
        "bad.log: no throughput lines",
        "gone: no such file",
        "elsewhere/empty: neither a run directory nor a log, or a folder of them",
    )
    with pytest.raises(UserError, match=".*; .*".join(reasons)):
        read_runs(inputs, given())
    (found,) = read_runs([*inputs, tmp_path / "run-1"], given())
    assert (found.state, found.notes) == ("failed", "no complete window was measured")
    printed = capsys.readouterr().err
    assert printed.count("warning") == 3
    assert all(f"{tmp_path}/{reason}" in printed for reason in reasons)


def test_a_folder_that_cannot_be_read_is_named_and_its_neighbours_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path / "run", [], state="failed", num_nodes=1, world_size=4)
    closed, listed = tmp_path / "closed", Path.iterdir
    closed.mkdir()
    refused = Mock(side_effect=PermissionError(13, "Permission denied"))
    monkeypatch.setattr(Path, "iterdir", lambda self: refused() if self == closed else listed(self))
    assert [run.gpus for run in read_runs([tmp_path], given())] == [4]
    assert capsys.readouterr().err == f"warning: {closed}: can't be read (Permission denied); going on without it\n"


def test_runs_of_sweeps_are_found_and_other_folders_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `runs/*` names them, and folders given as a whole."""
    sweep = tmp_path / "sweeps" / "tiny"
    places = [tmp_path / "run-1", *(sweep / "runs" / f"n{nodes:03}" for nodes in (2, 4))]
    for number, place in enumerate(places):
        place.mkdir(parents=True)
        record(place, [], state="failed", num_nodes=2**number, world_size=2**number)
    for folder in (sweep / "n002", tmp_path / "jobs" / "tiny-1"):
        folder.mkdir(parents=True)
        (folder / "run.json").write_text("{}")
        (folder / "job.json").write_text("{}")
    every = sorted(tmp_path.iterdir())
    assert [path.name for path in every] == ["jobs", "run-1", "sweeps"]
    for inputs, gpus in (([sweep], [2, 4]), (every, [1, 2, 4]), ([tmp_path], [1, 2, 4])):
        assert [run.gpus for run in read_runs(inputs, given())] == gpus
    assert capsys.readouterr().err == ""
    record(tmp_path / "killed", [], state="running")
    assert len(read_runs([tmp_path], given())) == 3
    assert capsys.readouterr().err.startswith(f"warning: {tmp_path / 'killed'}: doesn't state the number of nodes")
    with pytest.raises(UserError, match="jobs: neither a run directory nor a log, or a folder of them"):
        read_runs([tmp_path / "jobs"], given())


def test_a_run_given_twice_or_copied_counts_once_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runs"
    shutil.copytree(DATA / "record_2ranks", folder / "first")
    shutil.copytree(DATA / "record_2ranks", folder / "copy")
    other = json.loads((folder / "first" / "summary.json").read_text())
    other["samples_per_s_per_gpu"]["windows"][0] *= 1.01
    shutil.copytree(folder / "first", folder / "other")
    (folder / "other" / "summary.json").write_text(json.dumps(other))
    failed = [write(tmp_path / f"{name}.log", "Traceback (most recent call last)\n") for name in ("f", "g")]
    options = given(nodes=1, gpus=2)
    assert len(read_runs([folder, LOG, write(tmp_path / "c.log", LOG.read_bytes())], options)) == 3
    copies = f"{folder / 'copy'}, {folder / 'first'}; {LOG}, {tmp_path / 'c.log'}"
    assert capsys.readouterr().err == f"note: the same run, counted once: {copies}\n"
    assert len(read_runs([write(tmp_path / "c.log.gz", gzip.compress(LOG.read_bytes())), LOG], options)) == 1
    assert len(read_runs([*failed, failed[0]], options)) == 2
    assert len(read_runs([TINY, TINY], options)) == len(read_runs([TINY], options)) > 5
    assert f"counted once: {TINY}, {TINY}\n" in capsys.readouterr().err


def test_a_folder_and_what_is_in_it_are_the_same_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`runs runs/*`; also where nothing was measured, so that their contents can't tell."""
    for name in ("a", "b"):
        record(tmp_path / name, [], state="failed", num_nodes=1, world_size=1, finished=name)
    assert len(read_runs([tmp_path, *sorted(tmp_path.iterdir())], given())) == 2
    assert f"counted once: {tmp_path / 'a'}, {tmp_path / 'a'}; " in capsys.readouterr().err
    for name in ("c", "d"):
        record(tmp_path / name, [], state="running", num_nodes=1, world_size=1)
    assert len(read_runs([tmp_path / "c", tmp_path / "d"], given())) == 2
    (tmp_path / "jobs").mkdir()
    read_runs([tmp_path, *sorted(tmp_path.iterdir())], given())
    assert "jobs" not in capsys.readouterr().err


@pytest.mark.parametrize("how", [["analysis/efficiency.py"], ["-m", "analysis.efficiency"]])
def test_the_command_works_as_script_and_module_without_torch(how: list[str], tmp_path: Path) -> None:
    words = [sys.executable, "-X", "importtime", *how, LOG]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert re.search(r"\| +1 \| +2 \| +9154.0 ± 1218.3 \|.*± from: 95 % interval of 30 windows", done.stdout, re.DOTALL)
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "clap_ds" in imported
    assert not imported & {"torch", "deepspeed", "matplotlib", "pydantic"}
    done = subprocess.run([sys.executable, *how, tmp_path / "nothing"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, f"error: {tmp_path / 'nothing'}: no such file or directory\n")
