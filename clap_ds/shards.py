"""Build and prepare training shards, and estimate what they need of storage.

    clap-shards build clips.csv shards --held_out 0.05      audio files with captions → shards
    clap-shards prepare 'shards/train-*.tar' mel --kind mel  shards → shards of model inputs
    clap-shards size --clips 1000000 --link 100             bytes, files, copy time, bandwidth per GPU

Subcommands are modules of `clap_ds.data`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from functools import partial

from clap_ds.config.arguments import make_parser
from clap_ds.config.errors import run_alone

COMMANDS = {
    "build": ("build_shards.build", "turn audio files with captions into shards"),
    "prepare": (
        "build_shards.prepare",
        "turn shards into shards of waveforms or log-mel features, a model's inputs",
    ),
    "size": ("shard_size", "estimate what shards need of disks, links and file systems before building any"),
}
"""Subcommand → (module of `clap_ds.data` with `add_…_options(parser)` and `run_…(options)`, help)."""


def main(argv: Sequence[str] | None = None) -> int | None:
    """Run a subcommand and return its exit code, if any."""
    words = sys.argv[1:] if argv is None else [*argv]
    listed = "; ".join(f"{name}: {what}" for name, (_, what) in COMMANDS.items())
    parser = make_parser("clap-shards", __doc__)
    parser.epilog = "Each subcommand has its own --help."
    parser.add_argument("command", choices=COMMANDS, help=listed)
    name = parser.parse_args(words[:1]).command
    module = importlib.import_module(f"clap_ds.data.{COMMANDS[name][0]}")
    own = make_parser(f"clap-shards {name}", COMMANDS[name][1])
    getattr(module, f"add_{name}_options")(own)
    code: int | None = getattr(module, f"run_{name}")(own.parse_intermixed_args(words[1:]))
    return code


command = partial(run_alone, main)

if __name__ == "__main__":
    command()
