"""Compare embeddings with open_clip's own CLAP models, in fp32, on random weights, in both
directions.

    PYTHONPATH=/path/to/open_clip/src python -m benchmarks.open_clip_parity --commit HASH [--output
    FILE.md]

open_clip's weights, saved as by its training, embed sounds of 3 and 10 s, with feature fusion also
the features of one of 14 s, and captions of 12 to 77 tokens. Then open_clip loads what `clap-ds
export --format open_clip` writes, and embeds the same. Its encoder under HTSAT's names must give an
equal audio tower. Needs no network.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import tempfile
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers

import clap_ds
from benchmarks.common import make_parser, show, table
from clap_ds.checkpoint.load_weights import load_weights
from clap_ds.model.clap import ClapModel
from clap_ds.utils.errors import UserError, run_alone
from clap_ds.weights.formats import htsat_alone
from clap_ds.weights.open_clip_weights import WEIGHTS, save_open_clip

ROBERTA = {
    "hf_model_name": "roberta-base",
    "hf_pooler_type": "mean_pooler",
    "hf_model_pretrained": False,
}
NAMED = (
    "CLAP-HTSAT-tiny-Roberta-base",
    "CLAP-HTSAT-tiny-Roberta-base-fused",
    "CLAP-HTSAT-base-Roberta-base",
)
MODELS = {
    key: {} if key in NAMED else {"text_cfg": ROBERTA}
    for key in (*NAMED, "CLAP-HTSAT-tiny", "CLAP-HTSAT-large")
}
SIZES: Any = {
    "vocab_size": 50265,
    "max_position_embeddings": 514,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
}
FUSED = ("sed_model.patch_embed.mel_conv2d", "sed_model.patch_embed.fusion_model")
TOLERANCE = 1e-6
PAIRS = {
    "audio": "audio",
    "text": "text",
    "back_audio": "exported: audio",
    "back_text": "exported: text",
}
COLUMNS = f"open_clip's model {{name}} | preset {{preset}}{''.join(f' | {PAIRS[key]} {{{key}:.1e}}' for key in PAIRS)}"
NOTE = """Largest differences of elements of embeddings of length 1. Different inputs differ by the last column or more.
The last two models have RoBERTa and the kind of head of CLAP-HTSAT-base-Roberta-base, not open_clip's default text tower."""


def compare(open_clip: Any, name: str) -> dict[str, Any]:
    """Return a row of the table. Files are written to the current folder."""
    torch.manual_seed(0)
    theirs = open_clip.create_model(name, pretrained_text=False, **MODELS[name]).eval()
    for key, tensor in theirs.state_dict().items():
        if tensor.is_floating_point() and "extractor." not in key and "attn_mask" not in key:
            tensor.add_(torch.randn_like(tensor), alpha=0.05)
    theirs.audio.encoder.bn0.running_mean.fill_(-30)
    theirs.audio.encoder.bn0.running_var.fill_(200)
    state = {key: value.contiguous() for key, value in theirs.state_dict().items()}
    torch.save(
        {"epoch": 1, "state_dict": {f"module.{key}": value for key, value in state.items()}},
        "epoch_1.pt",
    )
    safetensors.torch.save_file(state, "model.safetensors")
    clap = clap_ds.load("epoch_1.pt", device="cpu")
    weights = load_weights("model.safetensors")
    assert weights.fingerprint == clap.fingerprint
    fusion = clap.config.audio.fusion
    rate = clap.sample_rate
    sounds = [
        torch.linspace(0.9, 0, n) * (2 * torch.rand(n) - 1)
        for n in (3 * rate, 10 * rate, *[14 * rate] * fusion)
    ]
    read = [
        open_clip.audio.transform.audio_transform_v2(theirs.audio.cfg)((sound[None], rate))
        for sound in sounds
    ]
    batch = {key: torch.stack([torch.as_tensor(each[key]) for each in read]) for key in read[0]}
    audio = torch.from_numpy(clap.embed_audio([sound.numpy() for sound in sounds[:2]], rate))
    if fusion:
        audio = torch.cat([audio, clap.model.encode_audio(batch["mel_fusion"][2:])])
    mask = torch.arange(77) < torch.tensor([[12], [40], [77]])
    ids = torch.where(mask, torch.randint(4, 50_000, mask.shape), 1)
    text = clap.model.encode_text(ids, mask.long())

    def differences(model: Any) -> list[float]:
        pairs = ((audio, model.encode_audio(batch, True)), (text, model.encode_text(ids, True)))
        return [float((ours - found).abs().max()) for ours, found in pairs]

    found = differences(theirs)
    save_open_clip(weights.build(), Path(), 77)
    parts = {key.replace("audio.encoder.", "sed_model."): each for key, each in state.items()}
    shared = (key for key in parts if key.startswith("sed_model.") and not key.startswith(FUSED))
    torch.save({"state_dict": {key: parts[key] for key in shared}}, "htsat.ckpt")
    del theirs, state, parts
    load_weights("htsat.ckpt", clap.config).load_into(started := ClapModel(clap.config))
    assert all(
        torch.equal(tensor, weights.state[key])
        for key, tensor in htsat_alone(started.state_dict()).items()
    )
    found += differences(
        open_clip.create_model(*([name, WEIGHTS] if name in NAMED else ["local-dir:."])).eval()
    )
    least = min(float(torch.pdist(each, math.inf).min()) for each in (audio, text))
    return {
        "name": name,
        "preset": clap.config.name,
        **dict(zip(PAIRS, found, strict=True)),
        "least": least,
    }


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--commit",
        default="unknown",
        metavar="HASH",
        help="open_clip's, to record (default: unknown)",
    )
    arguments = parser.parse_args(argv)
    try:
        open_clip: Any = importlib.import_module("open_clip")
        importlib.import_module("open_clip.audio.htsat")
    except ImportError as error:
        raise UserError(
            f"open_clip 4 with audio, and what it requires, can't be imported: {error}"
        ) from None
    rows = []
    for name in MODELS:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), torch.no_grad():
            transformers.RobertaConfig(**SIZES).save_pretrained(
                "roberta-base"
            )  # instead of the Hub's
            rows.append(compare(open_clip, name))
    versions = (
        f"open_clip {open_clip.__version__} at commit {arguments.commit}, torch {torch.__version__}"
    )
    text = table(f"{COLUMNS} | different inputs {{least:.1e}}", rows)
    show(
        arguments.output,
        f"# Embeddings beside open_clip's own\n\n{versions}.\n\n{NOTE}\n\n{text}",
        rows,
    )
    return int(max(row[key] for row in rows for key in PAIRS) > TOLERANCE)


if __name__ == "__main__":
    run_alone(main)
