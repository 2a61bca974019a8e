"""`clap-ds COMMAND`: choose a command and run it. Each command is a function of `argv` in a
module that is imported only if it is chosen."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from clap_ds.config.arguments import COMMAND
from clap_ds.utils.errors import UserError, did_you_mean, exit_code_of
from clap_ds.utils.paths import VERSION

# group → command → module of `clap_ds`, with its function if that is not `main`, and a description
GROUPS = {
    "run": {
        "bench": ("bench", "measure training throughput"),
        "train": ("train", "train a model on audio with captions"),
        "evaluate": ("evaluate", "evaluate a checkpoint by retrieval and zero-shot classification"),
        "flops": ("flops", "count the FLOPs of a sample in two independent ways"),
        "plan": ("plan", "predict memory, throughput and GPU hours without a GPU"),
    },
    "data": {
        "shards": (
            "shards",
            "build and prepare training shards, or measure how fast they are loaded",
        )
    },
    "SLURM": {
        "hostfile": ("launch.slurm_hostfile", "write a DeepSpeed hostfile"),
        "preflight": ("launch.preflight", "check the hosts of an allocation"),
        "submit": ("launch.submit", "submit a run as a job"),
        "sweep": ("launch.sweep", "submit runs at several scales or settings, and watch them"),
    },
    "analyze": {
        "scaling": ("analysis.scaling", "print scaling efficiency and MFU of runs"),
        "plot": ("analysis.plot_scaling", "draw the scaling of runs, or a run's curves"),
        "compare": ("analysis.compare", "compare the throughput of two sets of runs"),
        "extrapolate": ("analysis.extrapolate", "extrapolate scaling to more GPUs"),
        "report": ("analysis.report", "write an HTML report about runs"),
    },
    "use": {
        "embed": ("inference.commands:embed", "embed audio files"),
        "classify": ("inference.commands:classify", "label audio files"),
        "search": ("inference.commands:search", "search embedded audio by text or sound"),
        "score": ("inference.commands:score", "score how well audio matches captions"),
        "export": ("checkpoint.export", "export a checkpoint for transformers or open_clip"),
    },
    "list": {"presets": ("presets", "list model presets and packaged run configurations")},
}
MODULES = {name: module for group in GROUPS.values() for name, (module, _) in group.items()}


def format_overview() -> str:
    """Return the help of `clap-ds`: all commands by group."""
    lines = [
        f"usage: {COMMAND} COMMAND …",
        f"       {COMMAND} COMMAND --help | --version",
        "",
        "Train CLAP models on DeepSpeed and measure how well training scales.",
        "For several ranks, use `deepspeed clap_ds/bench.py …` or torchrun,"
        " likewise train.py and evaluate.py.",
    ]
    for group, commands in GROUPS.items():
        lines += ["", f"{group}:"]
        lines += [f"  {name:<12} {purpose}" for name, (_, purpose) in commands.items()]
    return "\n".join(lines)


def run_command(arguments: Sequence[str]) -> int | None:
    """Run a command, the first argument, and return its exit code, if any. Raises UserError if it
    is unknown."""
    name, *options = arguments or ["--help"]
    if name in ("-h", "--help"):
        print(format_overview())
        return None
    if name == "--version":
        print(COMMAND, VERSION)
        return None
    if name not in MODULES:
        hint = did_you_mean(name, MODULES)
        raise UserError(f"{name!r} is no command{hint}; `{COMMAND} --help` lists all")
    module_name, _, function = MODULES[name].partition(":")
    module = importlib.import_module(f"clap_ds.{module_name}")
    code: int | None = getattr(module, function or "main")(options)
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Run `clap-ds` with this process's arguments, or others, and return the exit code."""
    if argv is not None:
        # `command_name` reads it.
        sys.argv = [COMMAND, *argv]
    return exit_code_of(lambda: run_command(sys.argv[1:]))
