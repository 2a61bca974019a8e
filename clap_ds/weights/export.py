"""Command: a checkpoint as a folder that `transformers.ClapModel` and `transformers.ClapProcessor` load.

    python -m clap_ds.weights.export CHECKPOINT FOLDER [--best] [--raw] [--tokenizer NAME_OR_FOLDER]

The tokenizer comes from the checkpoint or the command line.
"""

import argparse
import shutil
import sys
from pathlib import Path

import safetensors

from clap_ds.config.errors import exit_code_of
from clap_ds.model.tokenizer import load_tokenizer
from clap_ds.weights.expressible import changes
from clap_ds.weights.formats import LOGIT_BIAS, Checkpoint, save_transformers
from clap_ds.weights.hf_config import feature_extractor
from clap_ds.weights.load import load_weights

import transformers  # isort: skip  (after torchaudio_compat)


def export(found: Checkpoint, folder: Path, tokenizer: str | None = None) -> list[str]:
    """Write the folder, new or empty, all of it or nothing. Returns what its users should know, in words.

    Args:
        tokenizer: hub name or folder; None: that of training.

    Raises:
        ValueError: the model can't be expressed, there is no tokenizer or none that fits, or the folder is in use.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder}: expected a new or empty folder")
    tokenizer, text = tokenizer or found.tokenizer, found.config.text
    if tokenizer is None:
        raise ValueError(f"{found.shown} names no tokenizer: give it with --tokenizer")
    loaded = load_tokenizer(tokenizer, vocab_size=text.vocab_size, pad_token_id=text.pad_token_id)
    length = found.text_tokens or min(loaded.model_max_length, text.max_tokens)
    loaded.model_max_length = length  # what `truncation=True` keeps
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        save_transformers(found.build(), partial)
        transformers.ClapProcessor(feature_extractor(found.config.audio), loaded).save_pretrained(partial)
        if folder.exists():
            folder.rmdir()
        partial.rename(folder)
    except (OSError, safetensors.SafetensorError) as error:
        raise ValueError(f"{folder} can't be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    cut = "are only cut where the processor is told: text_kwargs={'padding': True, 'truncation': True}"
    remarks = [*changes(found.config), f"captions beyond {length} tokens {cut}"]
    fused = "of longer clips ClapFeatureExtractor takes parts at random, if there are 64 mel bins"
    refused = "longer clips than the model's are refused, as ClapFeatureExtractor crops at random alone"
    remarks.append(fused if found.config.audio.fusion else refused)
    if LOGIT_BIAS in found.state:
        remarks.append("the sigmoid loss's logit bias has no place in ClapModel; embeddings do without it")
    return remarks


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("clap_ds.weights.export", description=(__doc__ or "").splitlines()[0])
    kinds = "a checkpoint, a folder of them (its newest good one), a .safetensors file of this project's, or a LAION-CLAP .pt"
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help=kinds)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="to be made")
    parser.add_argument("--best", action="store_true", help="of a folder, the best by its run's best_by instead")
    raw = "of a run with clap.train.ema, the weights themselves instead of their moving average"
    parser.add_argument("--raw", action="store_true", help=raw)
    parser.add_argument("--tokenizer", metavar="NAME_OR_FOLDER", help="of the captions (default: the checkpoint's)")
    arguments = parser.parse_args(argv)
    found = load_weights(arguments.checkpoint, best=arguments.best, raw=arguments.raw)
    for remark in export(found, arguments.folder, arguments.tokenizer):
        print(f"note: {remark}")
    print(f"exported: {found.shown}, model {found.config.name}")
    print(f"{arguments.folder}: for transformers.ClapModel.from_pretrained and ClapProcessor.from_pretrained")


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
