"""Command: shards, from audio files to what training reads, and whether that is quick enough.

    clap-shards build clips.csv shards --held_out 0.05      audio files with captions → shards
    clap-shards prepare 'shards/train-*.tar' mel --kind mel  shards → shards of what the model sees
    clap-shards measure 'mel/*.tar'                         samples/s by workers
    clap-shards size --clips 1000000 --link 100             bytes, files, time to copy, bandwidth that GPUs ask for

Each subcommand is a module of `clap_ds.data`, imported when it is the one that runs.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from functools import partial

from clap_ds.config.errors import MISTAKES, run_alone

COMMANDS = {
    "build": ("build_shards.build", "turn audio files with captions into shards"),
    "prepare": (
        "build_shards.prepare",
        "turn shards into shards of waveforms or log-mel features, as a model sees them",
    ),
    "measure": ("loader_speed", "how fast shards can be read and decoded, and how many workers a step needs"),
    "size": ("shard_size", "what shards take of disks, links and file systems, before any is made"),
}
"""Subcommand → module, which has `add_…_options(parser)` and `run_…(options)`, and what it does."""


def main(argv: Sequence[str] | None = None) -> int | None:
    """Run a subcommand; its exit code, if it gives one. UserError, ValueError and OSError as it raises them."""
    words = sys.argv[1:] if argv is None else [*argv]
    listed = "\n".join(f"  {name:9}{what}" for name, (_, what) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="clap-shards", formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
        description=f"{(__doc__ or '').splitlines()[0]}\n\n{listed}", epilog="Each has its own --help.",
    )  # fmt: skip
    parser.add_argument("command", choices=COMMANDS)
    name = parser.parse_args(words[:1]).command
    module = importlib.import_module(f"clap_ds.data.{COMMANDS[name][0]}")
    own = argparse.ArgumentParser(prog=f"clap-shards {name}", description=COMMANDS[name][1], allow_abbrev=False)
    getattr(module, f"add_{name}_options")(own)
    code: int | None = getattr(module, f"run_{name}")(own.parse_intermixed_args(words[1:]))
    return code


command = partial(run_alone, main, MISTAKES)

if __name__ == "__main__":
    command()
