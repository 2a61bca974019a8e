"""Models of a shape that `transformers.ClapModel` lacks, as ones of a shape that it has and that give the same embeddings.

Projections of other widths than the joint space, or without biases, are filled up with zeros, in whose place ReLU and GELU
have zeros too. The mean over a caption's tokens becomes a further layer of the text tower: with queries and keys of 0 each
token attends to all alike, and what follows (layer norms, the first token's residual, the pooler's tanh) takes such small
numbers that it is linear in them, to within the rounding of fp32: a layer norm divides by the root of variance + eps, of
which only eps is left. The next linear, the projection's, multiplies them back up.
"""

import math

import torch
import torch.nn.functional as F

from clap_ds.config.model import ClapConfig, ProjectionConfig, TextConfig
from clap_ds.weights.key_mapping import State

_LAYERS = "text.roberta.encoder.layer."
_MEAN_TO_FIRST_TOKEN = 2.0**24  # by how much the mean outweighs the first token's own state, which comes with it
_SMALL = 2.0**-13  # in units of the root of eps; its square is lost beside 1 in fp32
_POOLED = 2.0**-17  # what goes into the tanh, of that; too large a factor back for float16: infinite rather than wrong


def expressible(config: ClapConfig, state: State) -> tuple[ClapConfig, State]:
    """Sizes and state (fp32, in `ClapModel`'s names) of a model that pools by the first token and has projections of one width,
    with biases. Embeddings are longer by zeros where a projection was wider. ValueError: the text tower is no RoBERTa."""
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
    """What `expressible` changes of a model that its user would notice, in words."""
    told = []
    if (width := _width(config)) > config.joint_dim:
        told.append(f"embeddings have {width} numbers, those beyond {config.joint_dim} are 0")
    if config.text.pooling == "mean":
        what = "the mean over a caption's tokens is a further layer of the text tower"
        told.append(f"{what}: for embeddings in float32 and bfloat16 (float16 gives NaN), not for further training")
    return told


def _width(config: ClapConfig) -> int:
    return max(config.joint_dim, config.audio.projection.hidden_dim, config.text.projection.hidden_dim)


def _widen(tower: str, config: ProjectionConfig, width: int, state: State) -> ProjectionConfig:
    """Fill both linears up to `width` with zeros, in place."""
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
    unit = 2.0 ** round(math.log2(root))  # powers of two, so that nothing is rounded
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
    # Of 1 in the mean of what the last layer norm made, without gain and shift:
    pooled = (unit / root) ** 2 * _SMALL * _POOLED
    weight, bias = (state[f"text_projection.linear1.{name}"].double() for name in ("weight", "bias"))
    state["text_projection.linear1.weight"] = (weight * gain / pooled).float()
    state["text_projection.linear1.bias"] = (bias + weight @ shift).float()
