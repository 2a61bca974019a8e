"""Export a checkpoint to a folder for `transformers.ClapModel` and `transformers.ClapProcessor`, or
for open_clip.

Examples:
    clap-ds export runs/my_run-…-checkpoints my_clap
    clap-ds export runs/my_run-…-checkpoints my_clap --format open_clip --best

The tokenizer comes from the checkpoint or the command line.
"""

from collections.abc import Sequence
from pathlib import Path

from clap_ds.config.arguments import make_parser
from clap_ds.utils.errors import run_alone

# Libraries, and the functions by which they load the folder.
FORMATS = {
    "transformers": "transformers.ClapModel.from_pretrained and ClapProcessor.from_pretrained",
    "open_clip": 'open_clip.create_model and get_tokenizer, as "local-dir:FOLDER"',
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = make_parser(__doc__)
    add = parser.add_argument
    sources = (
        "checkpoint, folder of checkpoints (the newest good one),"
        " or a file of LAION-CLAP or open_clip; paths or URLs"
    )
    add("checkpoint", metavar="CHECKPOINT", help=sources)
    add("folder", type=Path, metavar="FOLDER", help="new output folder")
    add("--format", choices=[*FORMATS], default="transformers", help="export for this library")
    best = "export a folder's best by best_metric, not the newest"
    add("--best", action="store_true", help=best)
    raw = "export a clap.train.ema_decay run's raw weights instead of their moving average"
    add("--no_ema", action="store_true", help=raw)
    tokenizer = "use this tokenizer: a Hub name or folder (default: the checkpoint's)"
    add("--tokenizer", metavar="NAME", help=tokenizer)
    arguments = parser.parse_args(argv)

    # Importing torch and transformers takes seconds: options are parsed before.
    from clap_ds.checkpoint import exporters, load_weights

    weights = load_weights.load_weights(
        arguments.checkpoint, best=arguments.best, raw=arguments.no_ema
    )
    exporters.export(weights, arguments.folder, arguments.tokenizer, arguments.format)
    print(f"exported: {weights.description}, model {weights.config.name}")
    print(f"{arguments.folder}: for {FORMATS[arguments.format]}")


if __name__ == "__main__":
    run_alone(main)
