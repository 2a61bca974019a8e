"""Command: hours of `make train-demo`'s run as a job on two nodes and a spare, with a fault every few minutes.

    python -m tests.cluster.soak --hours 2 --output results/cpu/soak/soak.md

A job that ended for want of hosts, or by a signal, is submitted again, as its user would. Beside it two ranks on no cluster
train by the same file without a fault: what both learned is compared to the bit, and their memory and descriptors are those
of the whole time. Needs what the tests here need.
"""

import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.common import make_parser, show, table
from clap_ds.config.arguments import whole_number
from clap_ds.config.errors import run_alone
from clap_ds.launch.batch_script import Request, script
from tests.cluster.conftest import Submitted, site_file
from tests.cluster.slurm_cluster import OVER, SlurmCluster

ROOT = Path(__file__).resolve().parents[2]
TRAIN = "clap_ds/train.py"
SIGNALS = ("KILL", "SEGV", "STOP", "TERM")
FAULTS = (*SIGNALS, "link cut", "job preempted", "disk full", "remote folder gone")
DISK_MB = 500
HISTORY = "history.jsonl"
SHORT_S, SAMPLE_S, MENDED_S = 60.0, 30.0, 1200.0
COLUMNS = (
    "minute {minute:.0f} | fault {fault} | on {host} | after step {step:,} | went on from step {resumed_at:,}"
    " | s until a new step {mended_s:.0f} | submitted again {submitted_again}"
)
FLAT = (
    "of {whose} | from minute {begin:.0f} | to {end:.0f} | MB then {mb[0]:,.0f} | and at the end {mb[1]:,.0f}"
    " | descriptors then {fds[0]:.0f} | at the end {fds[1]:.0f}"
)


class Soak:
    """The job, from one submission to the next."""

    def __init__(self, folder: Path, cluster: SlurmCluster, steps: int) -> None:
        self.folder, self.cluster, self.chance = folder, cluster, random.Random(7)
        self.disk, self.remote = folder / "disk", folder / "remote"
        (folder / "job").mkdir()
        self.remote.mkdir()
        write_run(folder / "job" / "run.json", steps, folder / "runs", self.disk / "checkpoints", self.remote)
        request = Request(
            site_file(folder, gpus_per_node=1), 1, None, train=True, time="12:00:00", launcher="slurm", spare_nodes=1
        )
        (folder / "job.sbatch").write_text(script(request, 2, "soak", f"{folder}/%j.out", folder / "job"))
        self.began, self.rows, self.to_come = time.monotonic(), list[dict[str, Any]](), list[str]()
        self.submit()

    def connect(self) -> None:
        """Connect hosts that SLURM has no answer of, and have it use them again."""
        lines = self.cluster.run("ctl", "sinfo", "-h", "-N", "-o", "%N %T").stdout.splitlines()
        for host, state in map(str.split, lines):
            if state not in ("idle", "allocated", "mixed", "completing"):
                self.cluster.connect(host)

    def submit(self) -> None:
        self.connect()
        self.cluster.wait_until(lambda: not self.cluster.processes(TRAIN), 300, "the end of a lost host's ranks")
        words = ["sbatch", "--parsable", "--gpus-per-node=1", "--cpus-per-task=4", str(self.folder / "job.sbatch")]
        self.job = Submitted(self.cluster, self.cluster.run("ctl", *words, folder=ROOT).stdout.strip(), self.folder)

    def is_over(self) -> bool:
        return self.cluster.job(self.job.number)["JobState"] in OVER

    def position(self) -> tuple[int, int]:
        """Starts of the run so far, and the last step of the newest."""
        runs = self.job.runs
        metrics = runs[-1] / "metrics.jsonl" if runs else None
        lines = metrics.read_text().splitlines() if metrics and metrics.exists() else []
        steps = [json.loads(line)["step"] for line in lines if line.endswith("}") and '"loss"' in line]
        return len(runs), max(steps, default=0)

    def strike(self) -> None:
        """One fault, and the wait until training goes on."""
        hosts = {host: pids for host in self.cluster.nodes if (pids := self.job.ranks(host))}
        runs, step = self.position()
        if not hosts or not step or self.is_over():
            return
        self.to_come = self.to_come or self.chance.sample(FAULTS, len(FAULTS))
        fault, host = self.to_come.pop(), self.chance.choice(sorted(hosts))
        minute, begun_s = (time.monotonic() - self.began) / 60, time.monotonic()
        if fault in SIGNALS:
            self.cluster.run(host, "kill", f"-{fault}", min(hosts[host]))
        elif fault == "link cut":
            self.cluster.cut(host)
        elif fault == "job preempted":
            self.cluster.run("ctl", "scancel", "--batch", "--signal=USR1", self.job.number)
        else:
            with self.full_disk() if fault == "disk full" else self.remote_gone():
                time.sleep(SHORT_S)
        ends_run = fault in SIGNALS or fault in FAULTS[len(SIGNALS) : -2]
        again = 0
        while True:
            now, at = self.position()
            if (now > runs and at > 0) if ends_run else at > step:
                break
            if self.is_over():
                self.submit()
                again += 1
            elif self.cluster.job(self.job.number)["JobState"] == "PENDING":
                self.connect()  # the host that ran its script was lost: SLURM queued it again, for as many hosts
            assert time.monotonic() - begun_s < MENDED_S, f"{fault} on {host}: {self.job.output[-3000:]}"
            time.sleep(1)
        resumed_at = (self.job.summaries[-1].get("resumed_at_step") or 0) if self.position()[0] > runs else step
        row = {
            "minute": minute,
            "fault": f"SIG{fault}" if fault in SIGNALS else fault,
            "step": step,
            "resumed_at": resumed_at,
        }
        where = host if fault in SIGNALS or fault == "link cut" else "all"
        row |= {"host": where, "mended_s": time.monotonic() - begun_s, "submitted_again": again}
        self.rows.append(row)
        print(json.dumps(row), flush=True)

    @contextlib.contextmanager
    def full_disk(self) -> Iterator[None]:
        with (self.disk / "filler").open("wb") as filler, contextlib.suppress(OSError):
            while True:
                os.write(filler.fileno(), bytes(2**20))
        yield
        (self.disk / "filler").unlink()

    @contextlib.contextmanager
    def remote_gone(self) -> Iterator[None]:
        away = self.remote.rename(self.folder / "away")
        self.remote.write_text("not a folder")
        yield
        self.remote.unlink()
        away.rename(self.remote)


def write_run(path: Path, steps: int, runs: Path, checkpoints: Path, remote: Path | None) -> None:
    """`train_demo_cpu.json` with more steps and checkpoints."""
    text = (ROOT / "ds_configs" / "train_demo_cpu.json").read_text()
    run = json.loads(text.replace("runs/train_demo_data", str(path.parent.parent / "data")))
    run["scheduler"]["params"]["total_num_steps"] = steps
    run["clap"]["train"] = {"samples": steps * 64, "log_every_steps": 10}
    run["clap"]["evaluation"]["every_steps"] = 200
    run["clap"]["checkpoint"] = {"every_steps": 50, "folder": str(checkpoints), "sync_every": 4}
    run["clap"]["checkpoint"] |= {"sync_to": f"file://{remote}"} if remote else {}
    run["clap"]["output"] = {"label": "soak", "root": str(runs)}
    path.write_text(json.dumps(run))
    runs.mkdir()


def make_data(folder: Path) -> None:
    for side, clips, shards, seed in (("train", 5200, 8, 0), ("held_out", 520, 2, 1)):
        words = f"{folder / side} --wordings {side} --clips {clips} --shards {shards} --seed {seed}".split()
        words += ["--seconds", "1-3", "--sample_rate", "16000", "--format", "wav"]
        subprocess.run([sys.executable, "-m", "examples.synthetic_sounds", *words], check=True)


def usage(mark: str) -> list[dict[str, float]]:
    """Memory in MB and descriptors of each process whose command line has a word, by its path; loaders' are left out."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            is_worker = words == process.parent().cmdline() if process.parent() else False
            if words and "python" in words[0] and any(mark in word for word in words[1:]) and not is_worker:
                found.append({"mb": process.memory_info().rss / 1e6, "fds": process.num_fds()})
    return found


def learned(history: Path) -> dict[str, Any]:
    """Losses and metrics by phase and step."""
    lines = map(json.loads, history.read_text().splitlines())
    times = {"train_s", "time_s", "data_wait_s", "memory_bytes"}
    return {
        f"{line['phase']} {line['step']}": {k: v for k, v in line.items() if k not in times}
        for line in lines
        if line["phase"] != "checkpoint"
    }


def soak(folder: Path, hours: float, minutes: float, steps: int) -> tuple[str, dict[str, Any]]:
    make_data(folder / "data")
    (folder / "disk").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "soak", str(folder / "disk")], check=True)
    (folder / "control").mkdir()
    path = folder / "control" / "run.json"
    write_run(path, steps, folder / "control-runs", folder / "control" / "checkpoints", None)
    variables = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    words = ["-m", "clap_ds.ranks.start", "--num_gpus", "2", TRAIN, "--deepspeed_config", str(path)]
    with (folder / "control.out").open("w") as out, contextlib.closing(SlurmCluster(3, "soak")) as cluster:
        control = subprocess.Popen([sys.executable, *words], cwd=ROOT, env=variables, stdout=out, stderr=out)
        run, samples = Soak(folder, cluster, steps), list[dict[str, Any]]()
        struck = run.began
        while (now := time.monotonic()) < run.began + hours * 3600:
            if now - struck > minutes * 60:
                run.strike()
                struck = now
            if run.is_over():
                run.submit()
            marks = {"control": str(path), "soak": str(folder / "job/run.json"), "job": "clap_ds.launch.job"}
            samples.append({"minute": (now - run.began) / 60} | {whose: usage(mark) for whose, mark in marks.items()})
            time.sleep(SAMPLE_S)
        cluster.run("ctl", "scancel", run.job.number)
        cluster.wait_until(run.is_over, MENDED_S, "the end of the job")
        ours, theirs = run.disk / "checkpoints" / HISTORY, path.parent / "checkpoints" / HISTORY
        last = max(line["step"] for line in learned(ours).values())
        caught_up = lambda: control.poll() is not None or f"train {last}" in learned(theirs)  # noqa: E731
        cluster.wait_until(caught_up, hours * 3600, "the run without faults to come as far")
        control.terminate()
        control.wait()
        left = {host: cluster.run(host, "ls", "/dev/shm").stdout.split() for host in cluster.nodes}
        left_behind = cluster.left_behind(TRAIN)
    ours, theirs = (
        {name: line for name, line in learned(each).items() if line["step"] <= last} for each in (ours, theirs)
    )
    last = max((name for name in ours if name.startswith("evaluation")), key=lambda name: ours[name]["step"])
    differing = [name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)]
    figures = {
        "faults": run.rows, "samples": samples, "differing": sorted(differing), "compared": len(ours),
        "soak": ours[last], "control": theirs.get(last), "shared_memory_left": left, "processes_left": left_behind,
    }  # fmt: skip
    return report(figures), figures


def report(figures: dict[str, Any]) -> str:
    """Faults; what was learned; memory and descriptors at a tenth of the time and at its end, medians of a tenth of it."""
    samples, rows = figures["samples"], []
    tenth = max(1, len(samples) // 10)
    for whose in ("control", "soak", "job"):
        there = [each for each in samples if each[whose]]
        parts = (there[tenth : 2 * tenth], there[-tenth:])
        most = {
            key: [median(max(p[key] for p in each[whose]) for each in part) for part in parts] for key in ("mb", "fds")
        }
        rows.append({"whose": whose, "begin": parts[0][0]["minute"], "end": parts[1][-1]["minute"], **most})
    same = (
        "the same to the bit"
        if not figures["differing"]
        else f"{len(figures['differing'])} DIFFER: {figures['differing'][:5]}"
    )
    last = [{k: v for k, v in figures[side].items() if "top1" in k or "r1" in k} for side in ("soak", "control")]
    text = f"{len(figures['faults'])} faults. Of {figures['compared']} losses and evaluations: {same}."
    text += f" At the end, with faults {last[0]}, without {last[1]}."
    text += f" Left on hosts: processes {figures['processes_left']}, shared memory {figures['shared_memory_left']}."
    return "\n\n".join((text, table(COLUMNS, figures["faults"]), table(FLAT, rows)))


def main(argv: list[str] | None = None) -> None:
    parser = make_parser("soak", __doc__)
    parser.add_argument("--hours", type=float, default=2.0, help="after which it is stopped (default 2)")
    parser.add_argument("--minutes", type=float, default=5.0, help="from one fault to the next (default 5)")
    parser.add_argument(
        "--steps", type=whole_number(100), default=12000, help="that its learning rate is for (default 12000)"
    )
    options = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="clap-soak-"))
    folder.chmod(0o755)
    print(folder, flush=True)
    show(options.output, *soak(folder, options.hours, options.minutes, options.steps))


if __name__ == "__main__":
    run_alone(main)
