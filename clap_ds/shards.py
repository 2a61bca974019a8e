"""Build and prepare training shards.

Examples:
    clap-ds shards build clips.csv shards --held_out 0.05       audio files with captions → shards
    clap-ds shards prepare 'shards/train-*.tar' mel --kind mel  shards → shards of model inputs

Each subcommand has its own --help.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from clap_ds.config.arguments import make_parser
from clap_ds.utils.errors import run_alone

MODULES = {"build": "build_shards.build", "prepare": "build_shards.prepare"}
"""Subcommand → module of `clap_ds.data` with `add_…_options(parser)` and `run_…(options)`."""


def main(argv: Sequence[str] | None = None) -> int | None:
    """Run a subcommand and return its exit code, if any."""
    words = sys.argv[1:] if argv is None else [*argv]
    parser = make_parser(__doc__)
    parser.add_argument("command", choices=MODULES, help="what to do")
    name = parser.parse_args(words[:1]).command
    module = importlib.import_module(f"clap_ds.data.{MODULES[name]}")
    subparser = make_parser(module.__doc__, name)
    getattr(module, f"add_{name}_options")(subparser)
    code: int | None = getattr(module, f"run_{name}")(subparser.parse_intermixed_args(words[1:]))
    return code


if __name__ == "__main__":
    run_alone(main)
