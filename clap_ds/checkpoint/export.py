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


def export(
    found: Checkpoint, folder: Path, tokenizer: str | None = None, form: str = "transformers"
) -> None:
    """Write the new folder, in one of `FORMATS`, atomically. Raises ValueError if the model can't
    be expressed, no tokenizer fits, or the folder exists."""
    if folder.exists():
        raise ValueError(f"{folder} exists: expected a new folder")
    if found.config.open_clip:
        from clap_ds.checkpoint.checkpoint_files import WEIGHTS

        weights = Path(found.path)
        if weights.is_dir():
            weights /= WEIGHTS
        loading = f"open_clip.create_model({found.config.open_clip!r}, pretrained={str(weights)!r})"
        raise ValueError(f"{weights} has open_clip's names already: load it by {loading}")
    # Importing torch and transformers takes seconds: options are parsed before.
    import safetensors

    from clap_ds.weights.formats import save_transformers
    from clap_ds.weights.hub import load_tokenizer
    from clap_ds.weights.key_mapping import feature_extractor
    from clap_ds.weights.open_clip_weights import save_open_clip

    import transformers  # isort: skip  (after torchaudio_compat)

    tokenizer = tokenizer or (found.tokenizer and found.tokenizer_name)
    text = found.config.text
    if tokenizer is None:
        raise ValueError(f"{found.shown} names no tokenizer: set --tokenizer")
    loaded = load_tokenizer(tokenizer, vocab_size=text.vocab_size, pad_token_id=text.pad_token_id)
    length = found.longest_caption
    loaded.model_max_length = length  # what `truncation=True` keeps
    try:
        with drafted(folder) as draft:
            if form == "open_clip":
                save_open_clip(found.build(), draft, length)
                loaded.save_pretrained(draft)
            else:
                save_transformers(found.build(), draft)
                transformers.ClapProcessor(
                    feature_extractor(found.config.audio), loaded
                ).save_pretrained(draft)
                cut = "only if the processor gets text_kwargs={'padding': True, 'truncation': True}"
                print(f"note: captions are truncated to {length} tokens {cut}")
    except (OSError, safetensors.SafetensorError) as error:
        raise ValueError(f"{folder} can't be written: {error}") from error


FORMATS = {
    "transformers": "transformers.ClapModel.from_pretrained and ClapProcessor.from_pretrained",
    "open_clip": 'open_clip.create_model and get_tokenizer, as "local-dir:FOLDER"',
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    kinds = "checkpoint, folder of checkpoints (the newest good one), or a file of LAION-CLAP or open_clip"
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help=kinds)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="new output folder")
    parser.add_argument(
        "--format", choices=[*FORMATS], default="transformers", help="export for this library"
    )
    parser.add_argument(
        "--best", action="store_true", help="export a folder's best by best_metric, not the newest"
    )
    raw = "export a clap.train.ema_decay run's raw weights instead of their moving average"
    parser.add_argument("--no_ema", action="store_true", help=raw)
    tokenizer = "use this tokenizer: a Hub name or folder (default: the checkpoint's)"
    parser.add_argument("--tokenizer", metavar="NAME", help=tokenizer)
    arguments = parser.parse_args(argv)
    from clap_ds.checkpoint.load_weights import load_weights  # imports torch

    found = load_weights(arguments.checkpoint, best=arguments.best, raw=arguments.no_ema)
    export(found, arguments.folder, arguments.tokenizer, arguments.format)
    print(f"exported: {found.shown}, model {found.config.name}")
    print(f"{arguments.folder}: for {FORMATS[arguments.format]}")


if __name__ == "__main__":
    run_alone(main)
