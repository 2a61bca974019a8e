"""Export a checkpoint to a folder for `transformers.ClapModel` and `transformers.ClapProcessor`, or
for open_clip.

Examples:
    clap-ds export runs/my_run-…-checkpoints my_clap
    clap-ds export runs/my_run-…-checkpoints my_clap --format open_clip --best

The tokenizer comes from the checkpoint or the command line.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from clap_ds.config.arguments import make_parser
from clap_ds.utils.errors import run_alone
from clap_ds.utils.files import drafted

if TYPE_CHECKING:
    from clap_ds.weights.formats import Checkpoint


FORMATS = {
    "transformers": "transformers.ClapModel.from_pretrained and ClapProcessor.from_pretrained",
    "open_clip": 'open_clip.create_model and get_tokenizer, as "local-dir:FOLDER"',
}


def export(
    weights: Checkpoint,
    folder: Path,
    tokenizer_name: str | None = None,
    library: str = "transformers",
) -> None:
    """Write the new folder for one of the libraries of `FORMATS`, atomically. Raises ValueError if
    the model can't be expressed, no tokenizer fits, or the folder exists."""
    # Importing torch and transformers takes seconds: options are parsed before.
    import safetensors

    from clap_ds.checkpoint.checkpoint_files import WEIGHTS
    from clap_ds.weights.formats import save_transformers
    from clap_ds.weights.hub import load_tokenizer
    from clap_ds.weights.key_mapping import feature_extractor
    from clap_ds.weights.open_clip_weights import save_open_clip

    import transformers  # isort: skip  (after torchaudio_compat)

    if folder.exists():
        raise ValueError(f"{folder} exists: expected a new folder")
    if weights.config.open_clip:
        path = Path(weights.path)
        if path.is_dir():
            path /= WEIGHTS
        loading = f"open_clip.create_model({weights.config.open_clip!r}, pretrained={str(path)!r})"
        raise ValueError(f"{path} has open_clip's names already: load it by {loading}")
    if tokenizer_name is None and weights.tokenizer:
        tokenizer_name = weights.tokenizer_name
    if tokenizer_name is None:
        raise ValueError(f"{weights.shown} names no tokenizer: set --tokenizer")
    text = weights.config.text
    tokenizer = load_tokenizer(
        tokenizer_name, vocab_size=text.vocab_size, pad_token_id=text.pad_token_id
    )
    length = weights.longest_caption
    # The length that `truncation=True` keeps.
    tokenizer.model_max_length = length
    try:
        with drafted(folder) as draft:
            if library == "open_clip":
                save_open_clip(weights.build(), draft, length)
                tokenizer.save_pretrained(draft)
            else:
                save_transformers(weights.build(), draft)
                front_end = feature_extractor(weights.config.audio)
                transformers.ClapProcessor(front_end, tokenizer).save_pretrained(draft)
                print(
                    f"note: captions are truncated to {length} tokens"
                    " only if the processor gets text_kwargs={'padding': True, 'truncation': True}"
                )
    except (OSError, safetensors.SafetensorError) as error:
        raise ValueError(f"{folder} can't be written: {error}") from error


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = make_parser(__doc__)
    add = parser.add_argument
    sources = "checkpoint, folder of checkpoints (the newest good one), or a file of LAION-CLAP or open_clip"
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

    # Importing torch takes seconds.
    from clap_ds.checkpoint.load_weights import load_weights

    weights = load_weights(arguments.checkpoint, best=arguments.best, raw=arguments.no_ema)
    export(weights, arguments.folder, arguments.tokenizer, arguments.format)
    print(f"exported: {weights.shown}, model {weights.config.name}")
    print(f"{arguments.folder}: for {FORMATS[arguments.format]}")


if __name__ == "__main__":
    run_alone(main)
