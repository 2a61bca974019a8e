"""Write a model for other libraries: `transformers` or open_clip."""

from pathlib import Path

import safetensors

from clap_ds.checkpoint.checkpoint_files import WEIGHTS
from clap_ds.utils.files import create_folder_atomically
from clap_ds.weights.formats import Checkpoint, save_transformers
from clap_ds.weights.hub import load_tokenizer
from clap_ds.weights.key_mapping import feature_extractor
from clap_ds.weights.open_clip_weights import save_open_clip

import transformers  # isort: skip  (after torchaudio_compat)


def export(
    weights: Checkpoint,
    folder: Path,
    tokenizer_name: str | None = None,
    library: str = "transformers",
) -> None:
    """Write the new folder for one of the libraries of `FORMATS`, atomically. Raises ValueError if
    the model can't be expressed, no tokenizer fits, or the folder exists."""
    if folder.exists():
        raise ValueError(f"{folder} exists: expected a new folder")
    # Such a model needs no conversion.
    if weights.config.open_clip:
        path = Path(weights.path)
        if path.is_dir():
            path /= WEIGHTS
        loading = f"open_clip.create_model({weights.config.open_clip!r}, pretrained={str(path)!r})"
        raise ValueError(f"{path} has open_clip's names already: load it by {loading}")
    # A name in the file is checked by `tokenizer_name`.
    if tokenizer_name is None and weights.tokenizer:
        tokenizer_name = weights.tokenizer_name
    if tokenizer_name is None:
        raise ValueError(f"{weights.description} names no tokenizer: set --tokenizer")
    text = weights.config.text
    tokenizer = load_tokenizer(
        tokenizer_name, vocab_size=text.vocab_size, pad_token_id=text.pad_token_id
    )
    length = weights.longest_caption
    # The length that `truncation=True` keeps.
    tokenizer.model_max_length = length
    try:
        with create_folder_atomically(folder) as draft:
            if library == "open_clip":
                save_open_clip(weights.build(), draft, length)
                tokenizer.save_pretrained(draft)
                if text.caption_prefix:
                    print(f"note: begin every caption with {text.caption_prefix!r}, as in training")
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
