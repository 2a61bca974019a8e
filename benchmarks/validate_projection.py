"""Command: does the projection hold? Real runs on 1 to 4 hosts: fitted on 1 and 2, foretold and measured on 3 and 4.

    python -m benchmarks.validate_projection [--rates_mbit 100 50] [--output results/projection]

Hosts are network namespaces whose links `tc` shapes (root needed). Each runs one rank of `benchmarks.paced_bench`: the
project's engine, loss and gradient synchronisation on a small model, whose blocks sleep as if a GPU worked. With
`--runs FOLDER` the run directories are kept there, and evaluated again when they are there already. `step_model` gets
the bytes from the model, the bandwidth from `tc`, and nothing from 3 or 4 hosts.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.paced_runs import BUCKET_MB, JOINT_DIM, METHODS, MICRO_BATCH, run_trials
from clap_ds.analysis.record import is_record, read_record
from clap_ds.analysis.runs import InputError, Run, run_command
from clap_ds.analysis.step_model import Machine, Method, StepModel, Workload, fit
from clap_ds.analysis.table import markdown_table, write_text
from clap_ds.analysis.throughput import positive_float, positive_int

FITTED_HOSTS = (1, 2)
GOAL_PERCENT = 15.0
PAYLOAD_SHARE = 1448 / 1514
"""Of the bytes `tc` counts in a full Ethernet frame, those that TCP delivers."""
LATENCY_S = 200e-6
"""Of a hop between two namespaces, gloo's handling included."""


@dataclass(frozen=True)
class Trial:
    """Runs of one method at one link rate: step seconds by number of hosts, and what the model needs of them."""

    method: str
    rate_mbit: float
    step_s: dict[int, float]
    num_parameters: int
    pause_s: float
    cores: int
    """That all hosts share."""


@dataclass(frozen=True)
class Prediction:
    """A step's time on a number of hosts, foretold and measured."""

    trial: Trial
    hosts: int
    foretold_s: float
    unshared_s: float
    """Foretold as if every host had a core to itself."""
    terms_s: dict[str, float]

    @property
    def measured_s(self) -> float:
        return self.trial.step_s[self.hosts]

    @property
    def error_percent(self) -> float:
        return 100 * (self.foretold_s / self.measured_s - 1)

    @property
    def unchanged_error_percent(self) -> float:
        """Of foretelling that the step takes as long as on the most hosts fitted."""
        return 100 * (self.trial.step_s[max(FITTED_HOSTS)] / self.measured_s - 1)


def foretell(trial: Trial) -> tuple[StepModel, list[Prediction]]:
    """Fit the step model to 1 and 2 hosts and foretell the others.

    Hosts that outnumber the cores take turns: what a rank computes beyond its pauses (known from 1 host) then takes as
    many times longer as ranks share the fullest core.

    Raises:
        InputError: 1 or 2 hosts were not measured.
    """
    missing = [hosts for hosts in FITTED_HOSTS if hosts not in trial.step_s]
    if missing:
        raise InputError(f"{trial.method}, {trial.rate_mbit:g} Mbit/s: no run on {missing} hosts to fit")
    workload = Workload(MICRO_BATCH, JOINT_DIM, trial.num_parameters, gpus_per_node=1)
    machine = Machine(
        node_bytes_per_s=trial.rate_mbit * 1e6 / 8 * PAYLOAD_SHARE, latency_s=LATENCY_S,
        peak_flops=math.inf, memory_bytes_per_s=math.inf,
    )  # fmt: skip
    method = Method(trial.method == "overlapped", 2, 2, "exact_local", BUCKET_MB * 1e6, early_gather=True)
    model = fit(workload, machine, method, [(hosts, MICRO_BATCH / trial.step_s[hosts]) for hosts in FITTED_HOSTS])
    computed_s = max(0.0, trial.step_s[1] - trial.pause_s)
    found = []
    for hosts in sorted(set(trial.step_s) - set(FITTED_HOSTS)):
        terms = model.terms_s(hosts)
        shared = (math.ceil(hosts / trial.cores) - 1) * computed_s
        found.append(Prediction(trial, hosts, sum(terms.values()) + shared, sum(terms.values()), terms))
    return model, found


def read_trials(folder: Path, choose: Callable[[Sequence[float]], float] = median) -> list[Trial]:
    """Trials among the run directories of `<folder>/<rate>mbit/`.

    Args:
        folder: what `run_trials` filled.
        choose: the step time that stands for all windows of all repeats at one number of hosts.

    Raises:
        InputError: none, or a run that didn't complete.
    """
    trials = []
    for rate_folder in sorted(folder.glob("*mbit"), key=lambda path: -float(path.name.removesuffix("mbit"))):
        paths = [path for path in sorted(rate_folder.iterdir()) if is_record(path)]
        for method in METHODS:
            runs = [(read_record(path), _summary(path)) for path in paths if path.name.startswith(method)]
            if runs:
                trials.append(_trial(method, float(rate_folder.name.removesuffix("mbit")), runs, choose))
    if not trials:
        raise InputError(f"{folder}: no runs in <rate>mbit/")
    return trials


def _summary(path: Path) -> dict[str, Any]:
    environment = json.loads((path / "environment.json").read_text())
    return {**json.loads((path / "summary.json").read_text()), "cpu_count": environment["cpu_count"]}


def _trial(
    method: str,
    rate_mbit: float,
    runs: Sequence[tuple[Run, dict[str, Any]]],
    choose: Callable[[Sequence[float]], float],
) -> Trial:
    step_s: dict[int, list[float]] = {}
    for run, _ in runs:
        if run.state != "completed" or not run.windows or not run.num_nodes or not run.batch_per_gpu:
            raise InputError(f"{run.source}: state {run.state}; expected a completed run")
        step_s.setdefault(run.num_nodes, []).extend(run.batch_per_gpu / rate for rate in run.windows)
    summary = runs[0][1]
    chosen = {hosts: choose(times) for hosts, times in sorted(step_s.items())}
    return Trial(method, rate_mbit, chosen, summary["num_parameters"], summary["pause_s"], summary["cpu_count"])


def render(trials: Sequence[Trial], fastest: Sequence[Trial] = ()) -> str:
    """The verdict first, then prediction beside measurement, then what was given and fitted.

    Args:
        trials: of the median windows.
        fastest: of the fastest ones, to show what other programs on the machine did to the medians.
    """
    first = trials[0]
    lines = ["## Projection against measurement", "", *_compared(trials, "median window")]
    if fastest:
        lines += [*_compared(fastest, "fastest window"), "Fastest: what else runs on the cores can only add time.", ""]
    lines += [
        f"Given, not fitted: {first.num_parameters / 1e6:.2f} M bf16 gradients, features of {MICRO_BATCH} × {JOINT_DIM} a "
        f"tower in bf16, exact local loss, links at the rate set times {PAYLOAD_SHARE:.3f} (frame headers), buckets of "
        f"{BUCKET_MB:g} MB. A step pauses {first.pause_s:g} s in place of a GPU's work; what the small model itself computes "
        f"({first.step_s[1] - first.pause_s:.2f} s) shares {first.cores} cores among all hosts, and is counted once for "
        "every rank on the fullest core. A window is a step, until its slowest rank is done.", "",
    ]  # fmt: skip
    return "\n".join(lines)


def _compared(trials: Sequence[Trial], statistic: str) -> list[str]:
    fitted = [foretell(trial) for trial in trials]
    found = [prediction for _, predictions in fitted for prediction in predictions]
    lines = []
    if found:
        worst = max(abs(prediction.error_percent) for prediction in found)
        verdict = "within" if worst <= GOAL_PERCENT else "beyond"
        within = sum(abs(prediction.error_percent) <= GOAL_PERCENT for prediction in found)
        lines += [
            f"By the {statistic}, {within} of {len(found)} predictions within {GOAL_PERCENT:g} % of the measured step time; "
            f"the largest error, {worst:.1f} %, is {verdict} that goal.", "",
        ]  # fmt: skip
    header = (
        "gradients by", "link Mbit/s", "hosts", "foretold s", "measured s", "error %", "each its own core, error %",
        "as on 2 hosts, error %",
    )  # fmt: skip
    rows = []
    for p in found:
        unshared = f"{100 * (p.unshared_s / p.measured_s - 1):+.1f}"
        cells = [f"{p.foretold_s:.3f}", f"{p.measured_s:.3f}", f"{p.error_percent:+.1f}", unshared]
        rows.append(
            [p.trial.method, f"{p.trial.rate_mbit:g}", str(p.hosts), *cells, f"{p.unchanged_error_percent:+.1f}"]
        )
    lines += [markdown_table(header, rows), "", "Fitted on 1 and 2 hosts only:", ""]
    fit_header = ("gradients by", "link Mbit/s", "1 host s", "2 hosts s", "compute s", "delay scale s")
    rows = []
    for trial, (model, _) in zip(trials, fitted, strict=True):
        seconds = [f"{value:.3f}" for value in (trial.step_s[1], trial.step_s[2], model.compute_s, model.delay_s)]
        rows.append([trial.method, f"{trial.rate_mbit:g}", *seconds])
    return [*lines, markdown_table(fit_header, rows), ""]


def main() -> None:
    parser = argparse.ArgumentParser(description="Projection against measurement on 1 to 4 shaped hosts.")
    parser.add_argument(
        "--rates_mbit", type=positive_float, nargs="+", default=[100.0, 50.0], help="of each host's link"
    )
    parser.add_argument("--pause_s", type=positive_float, default=1.5, help="sleep a step in place of a GPU's work")
    parser.add_argument("--windows", type=positive_int, default=5, help="timed steps of each run")
    parser.add_argument("--repeats", type=positive_int, default=1, help="times to go through 1 to 4 hosts")
    parser.add_argument("--runs", type=Path, help="evaluate the runs in this folder, or put them there if it is new")
    parser.add_argument("--output", type=Path, help="folder for validation.md and validation.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.runs or Path(temporary)).resolve()
        if not any(folder.glob("*mbit/*")):
            run_trials(folder, options.rates_mbit, options.pause_s, options.windows, options.repeats)
        trials, fastest = read_trials(folder), read_trials(folder, min)
    text = render(trials, fastest)
    print(text, end="")
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        write_text(options.output / "validation.md", text)
        content = {"median_window": list(map(vars, trials)), "fastest_window": list(map(vars, fastest))}
        write_text(options.output / "validation.json", json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    run_command(main)
