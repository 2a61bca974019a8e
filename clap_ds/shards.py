"""Build and prepare training shards, and measure how fast they are loaded.

Examples:
    clap-ds shards build clips.csv shards --held_out 0.05       audio files with captions → shards
    clap-ds shards prepare 'shards/train-*.tar' mel --kind mel  shards → shards of model inputs
    clap-ds shards measure --deepspeed_config my_run.json       samples/s of a run's loader

Each subcommand has its own --help.
"""

from __future__ import annotations

import importlib
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence

from clap_ds.config.arguments import make_parser
from clap_ds.utils.errors import run_alone

MODULES = {"build": "build_shards.build", "prepare": "build_shards.prepare", "measure": "measure"}
"""Subcommand → module of `clap_ds.data` with `add_…_options(parser)` and `run_…(options)`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit code."""
    arguments = sys.argv[1:] if argv is None else [*argv]
    parser = make_parser(__doc__)
    parser.add_argument("command", choices=MODULES, help="what to do")
    name = parser.parse_args(arguments[:1]).command
    # Only the subcommand's module, because all import torch.
    module = importlib.import_module(f"clap_ds.data.{MODULES[name]}")
    subparser = make_parser(module.__doc__, name)
    add_options: Callable[[ArgumentParser], None] = getattr(module, f"add_{name}_options")
    run: Callable[[Namespace], int] = getattr(module, f"run_{name}")
    add_options(subparser)
    # Options may stand between SHARDS and FOLDER.
    return run(subparser.parse_intermixed_args(arguments[1:]))


if __name__ == "__main__":
    run_alone(main)
