"""Convert models to a shape that `transformers.ClapModel` supports, with the same embeddings.

Projections without biases, or of other widths than the joint space, are padded with zeros; ReLU and GELU map 0 to 0.
The mean over a caption's tokens becomes another layer of the text tower: with zero queries and keys, each token attends
equally to all. Layer norms and the pooler's tanh then get such small numbers that they are linear up to fp32 rounding:
of the variance + eps under a layer norm's root, only eps remains. The projection's first linear scales them back up.
"""

import math

import torch
import torch.nn.functional as F

from clap_ds.config.model import ClapConfig, ProjectionConfig, TextConfig
from clap_ds.weights.key_mapping import State

_LAYERS = "text.roberta.encoder.layer."
_MEAN_TO_FIRST_TOKEN = 2.0**24  # factor of the mean over the first token's residual
_SMALL = 2.0**-13  # in units of the root of eps; its square vanishes next to 1 in fp32
_POOLED = 2.0**-17  # factor before the tanh; undoing it overflows in float16, giving infinite rather than wrong results


def expressible(config: ClapConfig, state: State) -> tuple[ClapConfig, State]:
    """Return sizes and fp32 state of an equivalent model with first-token pooling and biased projections of one width.
    Embeddings are zero-padded if a projection was wider. Raises ValueError if the text tower isn't a RoBERTa."""
    if (architecture := config.text.architecture) != "roberta":
        reason = f"its text tower is a {architecture}, not a roberta"
        raise ValueError(f"{config.name} can't be a transformers.ClapModel: {reason}")
    state = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    width = _width(config)
    audio = config.audio.model_copy(update={"projection": _widen("audio", config.audio.projection, width, state)})
    text = config.text.model_copy(update={"projection": _widen("text", config.text.projection, width, state)})
    if text.pooling == "mean":
        _add_mean(text, state)
        text = text.model_copy(update={"pooling": "cls_pooler", "num_layers": text.num_layers + 1})
    return config.model_copy(update={"audio": audio, "text": text, "joint_dim": width}), state


def changes(config: ClapConfig) -> list[str]:
    """Describe the changes by `expressible` that users would notice."""
    told = []
    if (width := _width(config)) > config.joint_dim:
        told.append(f"embeddings have {width} elements, of which those beyond {config.joint_dim} are 0")
    if config.text.pooling == "mean":
        what = "an added layer of the text tower computes the mean over a caption's tokens"
        told.append(f"{what}: use float32 or bfloat16 (float16 gives NaN), and don't train it further")
    return told


def _width(config: ClapConfig) -> int:
    return max(config.joint_dim, config.audio.projection.hidden_dim, config.text.projection.hidden_dim)


def _widen(tower: str, config: ProjectionConfig, width: int, state: State) -> ProjectionConfig:
    """Zero-pad both linears to `width`, in place."""
    for name in ("linear1", "linear2"):
        weight = state[f"{tower}_projection.{name}.weight"]
        bias = state.get(f"{tower}_projection.{name}.bias", weight.new_zeros(len(weight)))
        columns = weight.shape[1] if name == "linear1" else width
        state[f"{tower}_projection.{name}.weight"] = F.pad(
            weight, (0, columns - weight.shape[1], 0, width - len(weight))
        )
        state[f"{tower}_projection.{name}.bias"] = F.pad(bias, (0, width - len(bias)))
    return config.model_copy(update={"hidden_dim": width, "bias": True})


def _add_mean(config: TextConfig, state: State) -> None:
    """Add the layer and the pooler, in place."""
    last, added = (f"{_LAYERS}{number}." for number in (config.num_layers - 1, config.num_layers))
    state |= {name.replace(last, added): torch.zeros_like(state[name]) for name in list(state) if name.startswith(last)}
    gain, shift = (state[f"{last}output.LayerNorm.{name}"].double() for name in ("weight", "bias"))
    root = math.sqrt(config.layer_norm_eps)
    unit = 2.0 ** round(math.log2(root))  # powers of two avoid rounding
    ones, same = torch.ones(config.hidden_size), torch.eye(config.hidden_size)
    state |= {
        f"{last}output.LayerNorm.weight": ones * (unit * _SMALL / _MEAN_TO_FIRST_TOKEN),
        f"{last}output.LayerNorm.bias": ones * 0,
        f"{added}attention.self.value.weight": same,
        f"{added}attention.output.dense.weight": same * _MEAN_TO_FIRST_TOKEN,
        f"{added}attention.output.LayerNorm.weight": ones * unit,
        f"{added}output.LayerNorm.weight": ones,
        "text.roberta.pooler.dense.weight": same * _POOLED,
        "text.roberta.pooler.dense.bias": ones * 0,
    }
    # Pooled value for a mean of 1 of the last layer norm's output, without gain and shift.
    pooled = (unit / root) ** 2 * _SMALL * _POOLED
    weight, bias = (state[f"text_projection.linear1.{name}"].double() for name in ("weight", "bias"))
    state["text_projection.linear1.weight"] = (weight * gain / pooled).float()
    state["text_projection.linear1.bias"] = (bias + weight @ shift).float()
