"""Command: a checkpoint as a folder that `transformers.ClapModel` and `transformers.ClapProcessor` load.

    python -m clap_ds.weights.export CHECKPOINT FOLDER [--best] [--tokenizer NAME_OR_FOLDER] [--preset NAME]

Weights, sizes and front end are `formats.save_transformers`'; the tokenizer, the other half of the processor, comes from the
checkpoint or the command line.
"""

import argparse
import shutil
import sys
from pathlib import Path

import safetensors

from clap_ds.config.errors import exit_code_of
from clap_ds.config.model import ClapConfig, load_preset
from clap_ds.config.model_names import preset_names
from clap_ds.model.tokenizer import load_tokenizer
from clap_ds.weights.expressible import changes
from clap_ds.weights.formats import LOGIT_BIAS, save_transformers
from clap_ds.weights.hf_config import feature_extractor
from clap_ds.weights.load import load_weights, locate, taken, text_tokens_of, tokenizer_of

import transformers  # isort: skip  (after torchaudio_compat)


def export(checkpoint: Path, folder: Path, tokenizer: str | None = None, config: ClapConfig | None = None) -> list[str]:
    """Write the folder, all of it or nothing.

    Args:
        checkpoint: anything `load_weights` takes.
        folder: to be made, or empty.
        tokenizer: hub name or folder; None: the checkpoint's.
        config: the sizes to expect.

    Returns:
        The model's name, and what whoever uses the folder should know, in words.

    Raises:
        ValueError: the checkpoint can't be read or expressed, there is no tokenizer or none that fits, or the folder is in use.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder}: expected a new or empty folder")
    found = load_weights(checkpoint, config)
    tokenizer = tokenizer or tokenizer_of(checkpoint)
    if tokenizer is None:
        raise ValueError(f"{checkpoint} names no tokenizer: give it with --tokenizer")
    text = found.config.text
    loaded = load_tokenizer(tokenizer, vocab_size=text.vocab_size)
    trained = text_tokens_of(checkpoint, found.config)
    loaded.model_max_length = trained or min(loaded.model_max_length, text.max_tokens)  # what `truncation=True` keeps
    processor = transformers.ClapProcessor(feature_extractor(found.config.audio), loaded)
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        save_transformers(found.build(), partial)
        processor.save_pretrained(partial)
        if folder.exists():
            folder.rmdir()
        partial.rename(folder)
    except (OSError, safetensors.SafetensorError) as error:
        raise ValueError(f"{folder} can't be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    long = f"captions beyond {loaded.model_max_length} tokens, the length "
    long += "of training" if trained else "that the model has positions for (that of training isn't known)"
    remarks = [
        f"the model is {found.config.name}",
        *changes(found.config),
        f"{long}, are only cut where the processor is told: text_kwargs={{'padding': True, 'truncation': True}}",
    ]
    if (bias := found.state.get(LOGIT_BIAS)) is not None:
        what = f"the sigmoid loss's logit bias, {float(bias):.3f}"
        remarks.append(f"{what}, has no place in ClapModel; embeddings do without it")
    return remarks


def main(argv: list[str] | None = None) -> None:
    """Export and say so; raises ValueError where the checkpoint, the tokenizer or the folder can't be used."""
    parser = argparse.ArgumentParser("clap_ds.weights.export", description=(__doc__ or "").splitlines()[0])
    kinds = "a checkpoint, a folder of them (its newest good one), a .safetensors file of this project's, or a LAION-CLAP .pt"
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help=kinds)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="to be made")
    parser.add_argument("--best", action="store_true", help="of a folder, the best by its run's best_by instead")
    parser.add_argument("--tokenizer", metavar="NAME_OR_FOLDER", help="of the captions (default: the checkpoint's)")
    parser.add_argument("--preset", choices=preset_names(), help="the model's sizes, for a file that doesn't say them")
    arguments = parser.parse_args(argv)
    checkpoint = locate(arguments.checkpoint, best=arguments.best)
    config = load_preset(arguments.preset) if arguments.preset else None
    for remark in export(checkpoint, arguments.folder, arguments.tokenizer, config):
        print(f"note: {remark}")
    print(f"exported: {taken(checkpoint)}")
    print(f"{arguments.folder}: for transformers.ClapModel.from_pretrained and ClapProcessor.from_pretrained")


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
