"""Command: a checkpoint as a folder that `transformers.ClapModel` and `transformers.ClapProcessor` load.

    python -m clap_ds.weights.formats export CHECKPOINT DIR [--tokenizer NAME_OR_FOLDER]

Weights, sizes and front end are `weights.save_transformers`'; the tokenizer, the other half of the processor, comes from the
checkpoint or the command line.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import safetensors

from clap_ds.config.errors import UserError, run_alone
from clap_ds.config.model import ClapConfig
from clap_ds.model.tokenizer import load_tokenizer
from clap_ds.weights import formats as weights
from clap_ds.weights.hf_config import feature_extractor
from clap_ds.weights.load import load_weights, locate, tokenizer_of

import transformers  # isort: skip  (after torchaudio_compat)


def export(checkpoint: str | Path, folder: str | Path, tokenizer: str | None = None) -> list[str]:
    """Write the folder, all of it or nothing.

    Args:
        checkpoint: anything `load_weights` takes that names its own sizes.
        folder: to be made, or empty.
        tokenizer: hub name or folder; None: the checkpoint's.

    Returns:
        What the folder can't express, in words.

    Raises:
        ValueError: the checkpoint can't be read or expressed, there is no tokenizer or none that fits, or the folder is in use.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder}: expected a new or empty folder")
    checkpoint = locate(checkpoint)
    found = load_weights(checkpoint)
    tokenizer = tokenizer or tokenizer_of(checkpoint)
    if tokenizer is None:
        raise ValueError(f"{checkpoint} names no tokenizer: give it with --tokenizer")
    processor = _processor(found.config, tokenizer)
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        weights.save_transformers(found.build(), partial)
        processor.save_pretrained(partial)
        if folder.exists():
            folder.rmdir()
        partial.rename(folder)
    except (OSError, safetensors.SafetensorError) as error:
        raise ValueError(f"{folder} can't be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    bias = found.state.get(weights.LOGIT_BIAS)
    if bias is None:
        return []
    return [f"the sigmoid loss's logit bias, {float(bias):.3f}, has no place in ClapModel; embeddings do without it"]


def _processor(config: ClapConfig, tokenizer: str) -> transformers.ClapProcessor:
    loaded = load_tokenizer(tokenizer, vocab_size=config.text.vocab_size)
    # So that `truncation=True` keeps what the model has positions for.
    loaded.model_max_length = min(loaded.model_max_length, config.text.max_tokens)
    return transformers.ClapProcessor(feature_extractor(config.audio), loaded)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="clap_ds.weights.formats", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    to_folder = commands.add_parser("export", help=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    to_folder.add_argument(
        "checkpoint",
        type=Path,
        metavar="CHECKPOINT",
        help="a checkpoint, a folder of checkpoints (its newest good one) or a .safetensors file of this project's",
    )
    to_folder.add_argument("folder", type=Path, metavar="DIR", help="to be made")
    to_folder.add_argument(
        "--tokenizer", metavar="NAME_OR_FOLDER", help="of the captions (default: the one in the checkpoint)"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Export and say so.

    Raises:
        UserError: the checkpoint, the tokenizer or the folder can't be used.
    """
    arguments = parse_arguments(argv)
    try:
        remarks = export(arguments.checkpoint, arguments.folder, arguments.tokenizer)
    except ValueError as error:
        raise UserError(str(error)) from error
    for remark in remarks:
        print(f"note: {remark}")
    print(f"{arguments.folder}: for transformers.ClapModel.from_pretrained and ClapProcessor.from_pretrained")


def command() -> None:
    """Entry point: run and end the process."""
    run_alone(main)
