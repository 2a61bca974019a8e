"""Compare embeddings with open_clip's own CLAP models, in fp32, on random weights, in both directions.

    PYTHONPATH=/path/to/open_clip/src python -m benchmarks.open_clip_parity --open_clip_commit HASH [--output FILE.md]

Per model: open_clip's weights, saved as by its training, embed sounds of 3 and 10 s from their samples, with feature fusion
also one of 14 s from its features, and captions of 12 to 77 tokens. Then `clap-export --format open_clip`'s file, loaded by
`open_clip.create_model`, embeds the same. The audio tower alone, under HTSAT's names, must load without a difference.
Needs no network. Without open_clip 4 and its requirements (timm, torchvision, torchlibrosa) nothing is compared.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import transformers
from torch import Tensor

import clap_ds
from benchmarks.common import make_parser, show, table
from clap_ds.config.errors import run_alone
from clap_ds.model.clap import ClapModel
from clap_ds.weights.load import load_weights
from clap_ds.weights.open_clip import WEIGHTS, save_open_clip

# open_clip's name, and whether it names this text tower (else base's is set, with which it was published)
MODELS = {
    "CLAP-HTSAT-tiny-Roberta-base": True,
    "CLAP-HTSAT-tiny-Roberta-base-fused": True,
    "CLAP-HTSAT-base-Roberta-base": True,
    "CLAP-HTSAT-tiny": False,
    "CLAP-HTSAT-large": False,
}
TEXT = {"hf_model_name": "roberta-base", "hf_pooler_type": "mean_pooler", "hf_model_pretrained": False}
SHORT_S, CLIP_S, LONG_S = 3, 10, 14
TOLERANCE = 1e-6
COLUMNS = (
    "open_clip's model {name} | text tower {text} | preset {preset} | audio {audio:.1e} | text {caption:.1e}"
    " | exported: audio {back_audio:.1e} | exported: text {back_caption:.1e} | HTSAT alone {htsat:.1e}"
    " | least distance {least:.1e}"
)


def randomize(model: torch.nn.Module) -> None:
    """Draw weights and statistics so that each affects the embeddings. The front end stays."""
    for name, tensor in model.state_dict().items():
        if not tensor.is_floating_point() or "extractor" in name or "attn_mask" in name:
            continue
        noise = torch.randn_like(tensor)
        if name.endswith("running_mean"):
            tensor.copy_(-30 + 10 * noise)
        elif name.endswith("running_var"):
            tensor.copy_(200 * noise.abs() + 50)
        elif tensor.ndim > 1:
            tensor.copy_(noise / (1 if "bias_table" in name else math.sqrt(tensor[0].numel())))
        else:
            tensor.copy_(0.2 * noise + (name.endswith("weight") or 2 * (name == "logit_scale")))


def captions() -> tuple[Tensor, Tensor]:
    """Return token ids and attention mask of captions of 12, 40 and 77 tokens."""
    mask = torch.arange(77) < torch.tensor([[12], [40], [77]])
    ids = torch.randint(4, 50_000, mask.shape)
    return torch.where(mask, ids, 1), mask.long()


def compare(open_clip: Any, name: str, folder: Path) -> dict[str, Any]:
    """Return the largest differences of a model's embeddings, one row of the table."""
    from open_clip.audio.transform import audio_transform_v2

    torch.manual_seed(0)
    is_named = MODELS[name]
    own = {} if is_named else {"text_cfg": TEXT}
    theirs = open_clip.create_model(name, pretrained_text=False, **own).eval()
    randomize(theirs)
    torch.save(
        {"epoch": 1, "state_dict": {f"module.{key}": value for key, value in theirs.state_dict().items()}}, "a.pt"
    )
    whole = {key: value.contiguous() for key, value in theirs.state_dict().items()}
    safetensors.torch.save_file(whole, "a.safetensors")
    clap = clap_ds.load("a.pt", device="cpu")
    assert load_weights("a.safetensors").fingerprint == clap.fingerprint
    fusion, rate = clap.config.audio.fusion, clap.sample_rate
    sounds = [0.3 * torch.randn(seconds * rate).clamp(-3, 3) for seconds in (SHORT_S, CLIP_S, *[LONG_S] * fusion)]
    sounds = [sound * torch.linspace(1, 0.01, len(sound)) for sound in sounds]
    inputs = [audio_transform_v2(theirs.audio.cfg)((sound[None], rate)) for sound in sounds]
    batch = {key: torch.stack([torch.as_tensor(each[key]) for each in inputs]) for key in inputs[0]}
    ids, mask = captions()
    ours_audio = torch.from_numpy(clap.embed_audio([np.asarray(sound) for sound in sounds[:2]], rate))
    if fusion:
        ours_audio = torch.cat([ours_audio, clap.model.encode_audio(batch["mel_fusion"][2:])])
    ours_caption = clap.model.encode_text(ids, mask)
    found = {
        "audio": ours_audio - theirs.encode_audio(batch, True),
        "caption": ours_caption - theirs.encode_text(ids, True),
    }
    htsat = {f"sed_model.{key}": value for key, value in theirs.audio.encoder.state_dict().items()}
    torch.save({"state_dict": htsat}, "htsat.ckpt")
    started, whole = ClapModel(clap.config), load_weights("a.pt").state
    load_weights("htsat.ckpt", clap.config).load_into(started)
    found["htsat"] = torch.stack(
        [(tensor - whole[key]).abs().max().float() for key, tensor in started.state_dict().items()
         if key.startswith("audio.") and not (fusion and (".mel_conv2d." in key or ".fusion_model." in key))]
    )  # fmt: skip
    del theirs, started, whole
    save_open_clip(load_weights("a.pt").build(), folder, 77)
    back = (name, str(folder / WEIGHTS)) if is_named else (f"local-dir:{folder}",)
    theirs = open_clip.create_model(*back).eval()
    found["back_audio"] = ours_audio - theirs.encode_audio(batch, True)
    found["back_caption"] = ours_caption - theirs.encode_text(ids, True)
    least = min(float(torch.pdist(each, math.inf).min()) for each in (ours_audio, ours_caption))
    row = {
        "name": name,
        "text": "its own" if is_named else "of CLAP-HTSAT-base-Roberta-base",
        "preset": clap.config.name,
    }
    return row | {"least": least} | {key: float(value.abs().max()) for key, value in found.items()}


def main(argv: list[str] | None = None) -> int:
    parser = make_parser("open_clip_parity", __doc__)
    parser.add_argument(
        "--open_clip_commit", default="unknown", metavar="HASH", help="commit of the imported copy, to record"
    )
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=[*MODELS], help="open_clip's names (default: all)"
    )
    arguments = parser.parse_args(argv)
    try:
        import open_clip
        import torchlibrosa  # noqa: F401

        assert "CLAP-HTSAT-tiny" in open_clip.list_models(), f"version {open_clip.__version__} has no CLAP"
    except (ImportError, AssertionError) as error:
        print(f"skipped: open_clip 4 with audio can't be imported ({error}): put its src on PYTHONPATH")
        return 0
    rows = []
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), torch.no_grad():
            sizes = {"max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
            transformers.RobertaConfig(vocab_size=50265, **sizes).save_pretrained(
                "roberta-base"
            )  # instead of the Hub's
            rows.append(compare(open_clip, name, Path(folder)))
    versions = f"open_clip {open_clip.__version__}, commit {arguments.open_clip_commit}; torch {torch.__version__}"
    versions += f", transformers {transformers.__version__}"
    note = (
        "Largest differences of elements of embeddings of length 1; the least distance is that of two different inputs."
    )
    show(
        arguments.output,
        f"# Embeddings beside open_clip's own\n\n{versions}.\n\n{note}\n\n{table(COLUMNS, rows)}",
        rows,
    )
    differences = (value for row in rows for key, value in row.items() if isinstance(value, float) and key != "least")
    return int(max(differences) > TOLERANCE)


if __name__ == "__main__":
    run_alone(main)
