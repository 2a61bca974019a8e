"""Train models of open_clip with this engine and with open_clip's own loop, and compare ten losses
on the same batches.

    PYTHONPATH=/path/to/open_clip/src torchrun --nproc_per_node 2 -m benchmarks.open_clip_training
    [--output FILE.md]

In fp32, from the same random weights, without dropout, stochastic depth and SpecAugment. open_clip
has its transforms and tokenizer, `ClipLoss` with local loss, DistributedDataParallel and AdamW.
HTSAT-tiny and Whisper-tiny have a small text tower. Needs no network.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import make_parser, show, table
from clap_ds.config.schema import LossSettings, ModelSettings
from clap_ds.data.batch import Batch, to_int16
from clap_ds.distributed.init import Ranks, initialize
from clap_ds.engine.engine import ClapEngine
from clap_ds.engine.factory import build_model
from clap_ds.engine.loss import build_loss
from clap_ds.model.mel import full_scale
from clap_ds.utils.errors import run_alone
from clap_ds.weights.hub import load_tokenizer, tokenize

STEPS = 10
CLIPS = 2
ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.98), "eps": 1e-6, "weight_decay": 0.2}
TEXT = {"context_length": 32, "vocab_size": 49408, "width": 64, "heads": 4, "layers": 2}
MODELS: dict[str, dict[str, Any]] = {
    "CLAP-HTSAT-tiny": {"text_cfg": TEXT},
    "CLAP-Whisper-tiny-Roberta-base": {"text_cfg": TEXT, "audio_cfg": {"pretrained": False}},
    "naflexclap_test": {},
}
TOLERANCE = 1e-4
COLUMNS = "model {name} | ranks {ranks} | first loss {first:.6f} | last loss {last:.6f} | largest difference {apart:.1e}"


def without_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("drop_prob", "spec_augmenter"):
            if hasattr(module, name):
                setattr(
                    module,
                    name,
                    nn.Identity() if isinstance(getattr(module, name), nn.Module) else 0.0,
                )


def batches(num_samples: int, rank: int) -> Iterator[tuple[Tensor, list[str]]]:
    """Yield int16 noise of various loudness and captions."""
    generator = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        loud = torch.rand(CLIPS, 1, generator=generator)
        noise = to_int16(loud * (2 * torch.rand(CLIPS, num_samples, generator=generator) - 1))
        yield noise, [f"sound number {rank} {step} {clip}" for clip in range(CLIPS)]


def their_losses(
    model: Any, name: str, rate: int, data: Iterator[tuple[Tensor, list[str]]], ranks: Ranks
) -> list[float]:
    import open_clip
    from open_clip.audio.naflex_audio import AudioNaFlexCfg, AudioNaFlexPatchify

    sizes = model.audio.cfg
    tokenizer = open_clip.get_tokenizer(name)
    is_naflex = sizes.model_type == "naflexvit"
    naflex = AudioNaFlexPatchify(AudioNaFlexCfg.from_clip_audio_cfg(sizes)) if is_naflex else None
    transform = naflex or open_clip.audio.transform.audio_transform_v2(sizes, is_train=True)
    loss = open_clip.ClipLoss(True, True, rank=ranks.rank, world_size=ranks.world_size)
    named = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    plain = [
        each.ndim < 2 or any(part in name for part in ("bn", "ln", "bias", "logit_scale"))
        for name, each in named
    ]
    groups = [
        {
            "params": [p for (_, p), skip in zip(named, plain, strict=True) if skip],
            "weight_decay": 0.0,
        }
    ]
    groups += [{"params": [p for (_, p), skip in zip(named, plain, strict=True) if not skip]}]
    optimizer = torch.optim.AdamW(groups, **ADAMW)
    wrapped = (
        nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        if ranks.world_size > 1
        else model
    )
    losses = []
    for noise, captions in data:
        read = [transform((clip[None], rate)) for clip in full_scale(noise)]
        audio = {key: torch.stack([torch.as_tensor(each[key]) for each in read]) for key in read[0]}
        optimizer.zero_grad()
        total = loss(*wrapped(audio, tokenizer(captions)))
        total.backward()
        optimizer.step()
        losses.append(float(total.detach()))
    return losses


def compare(name: str, folder: Path, ranks: Ranks, device: torch.device) -> dict[str, Any]:
    import open_clip

    config = open_clip.get_model_config(name)
    config = {
        key: {**value, **MODELS[name].get(key, {})} if key == "audio_cfg" else value
        for key, value in config.items()
    }
    config |= {"text_cfg": MODELS[name].get("text_cfg", config["text_cfg"])}
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": config}))
    local = f"local-dir:{folder}"
    torch.manual_seed(0)
    ours = build_model(ModelSettings(preset=f"open_clip:{local}"), LossSettings(), device)
    theirs = open_clip.create_model(local)
    state = {
        key: value.reshape(theirs.state_dict()[key].shape)
        for key, value in ours.state_dict().items()
        if key != "mel"
    }
    theirs.load_state_dict(state)
    for model in (ours, theirs):
        without_dropout(model.train())
    audio = ours.config.audio
    text = ours.config.text
    tokenizer = load_tokenizer(text.hub_name, vocab_size=text.vocab_size)
    length = TEXT["context_length"]
    expected = their_losses(
        theirs, local, audio.sample_rate, batches(audio.num_samples, ranks.rank), ranks
    )
    deepspeed = {
        "train_micro_batch_size_per_gpu": CLIPS,
        "gradient_clipping": 0.0,
        "log_level": "error",
    }
    engine = ClapEngine(
        ours,
        build_loss(LossSettings()),
        {**deepspeed, "optimizer": {"type": "AdamW", "params": ADAMW}},
    )
    data = (
        Batch(noise, *tokenize(captions, tokenizer, length))
        for noise, captions in batches(audio.num_samples, ranks.rank)
    )
    found = [float(engine.step(data)) for _ in range(STEPS)]
    apart = max(abs(a - b) for a, b in zip(found, expected, strict=True))
    return {
        "name": name,
        "ranks": ranks.world_size,
        "first": found[0],
        "last": found[-1],
        "apart": apart,
    }


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--commit",
        default="unknown",
        metavar="HASH",
        help="open_clip's, to record (default: unknown)",
    )
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=[*MODELS], help="to compare (default: all)"
    )
    arguments = parser.parse_args(argv)
    ranks = Ranks.from_environment()
    device = initialize(ranks)
    rows = []
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(compare(name, Path(folder), ranks, device))
    if ranks.rank == 0:
        text = f"# Losses beside open_clip's own loop\n\nopen_clip at commit {arguments.commit}, torch {torch.__version__}."
        show(arguments.output, f"{text}\n\n{table(COLUMNS, rows)}", rows)
    return int(max(row["apart"] for row in rows) > TOLERANCE)


if __name__ == "__main__":
    run_alone(main)
