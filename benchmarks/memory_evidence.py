"""Command: how much memory training needs by caption length, inferred and, on a GPU, measured.

    python -m benchmarks.memory_evidence --deepspeed_config ds_configs/htsat_tiny_amp.json [--text_tokens 77 512]

The published figures count 514 text tokens; whether the published runs can have used them is a question of memory. Inferred:
bytes the text tower keeps for backward, by formula and by counting what autograd saves. Measured: the peak of a short bench
run of the given configuration at each length, in a process of its own.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.common import make_parser, show, table
from benchmarks.variants import CONFIG, run_bench
from clap_ds.config.errors import UserError, run_alone
from clap_ds.config.model import TextConfig
from clap_ds.config.settings import RunSettings, load_run
from clap_ds.model.text import TextTower

BYTES = {"bf16": 34, "autocast": 42}
"""Per token, channel and layer, all in 16 bits, without attention scores (arXiv 2205.05198, section 4.1): inputs of the
query/key/value product 2, of attention 6, of its output layer 2, of the MLP's two layers and its activation 2 + 8 + 8, of two
norms 4, two dropout masks 2. Under autocast with fp32 parameters, as the published runs had: query, key and value each save
their own 16-bit copy of their input (+4), and both norms' inputs are fp32 (+4)."""
DROPOUT_MASK_BYTES = 2
INFERRED = "micro-batch {micro_batch} | text tokens {text_tokens}" + "".join(
    f" | {name}, {how}, bytes {{{name}_{how}_bytes:.4g}}" for name in BYTES for how in ("formula", "counted")
)
MEASURED = (
    "text tokens {text_tokens} | state {state} | peak, bytes {memory_peak_bytes:.4g} | device {device_name}"
    " | its memory, bytes {device_memory_bytes:.4g} | note {note}"
)
SHORT = {"warmup_steps": 1, "windows": 2, "steps_per_window": 1, "breakdown_steps": 0}


def counted_bytes(text: TextConfig, num_captions: int, text_tokens: int, *, autocast: bool) -> int:
    """Bytes that autograd really saves in the text tower for as many captions, dropout off, embeddings included.

    Counted on fake tensors, from the difference between two and three captions, so that what does not grow with the batch
    (16-bit copies of weights) drops out. Dropout is off because its mask takes 1 byte an element on a GPU but more on a CPU:
    add `DROPOUT_MASK_BYTES` per token, channel and layer.
    """
    return (_saved_bytes(text, 3, text_tokens, autocast) - _saved_bytes(text, 2, text_tokens, autocast)) * num_captions


def _saved_bytes(text: TextConfig, num_captions: int, text_tokens: int, autocast: bool) -> int:
    with torch.device("meta"):
        tower = TextTower(text, dropout=0.0, from_hub=False)
        tower.compute_every_token()  # as the published runs did
    tower = tower if autocast else tower.bfloat16()
    saved: dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage._cdata] = storage  # held, so that no later storage takes its address
        return tensor

    noted = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
    with FakeTensorMode(allow_non_fake_inputs=True):
        tower.to_empty(device="cpu")
        with noted, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            tower(torch.full((num_captions, text_tokens), 5), None)
    own = {parameter.untyped_storage()._cdata for parameter in tower.parameters()}
    return sum(storage.nbytes() for address, storage in saved.items() if address not in own)


def infer(run: RunSettings, text_tokens: int) -> dict[str, Any]:
    """The text tower's saved activations at the run's micro-batch, in bytes, by formula and by counting."""
    text, micro_batch = run.clap.preset().text, run.micro_batch
    elements, found = text.num_layers * text.hidden_size * micro_batch * text_tokens, {"micro_batch": micro_batch}
    for name, per_element in BYTES.items():
        counted = counted_bytes(text, micro_batch, text_tokens, autocast=name == "autocast")
        found |= {f"{name}_formula_bytes": per_element * elements}
        found |= {f"{name}_counted_bytes": DROPOUT_MASK_BYTES * elements + counted}
    return {"text_tokens": text_tokens, **found}


def measure(run: RunSettings, text_tokens: int) -> dict[str, Any]:
    """Peak memory of a few training steps with captions of `text_tokens`, in a process of its own: `run_bench`'s row and the
    device's memory. A UserError where the run didn't start."""
    command = [sys.executable, "-m", "clap_ds.bench", "--deepspeed_config", CONFIG]
    settings = {"clap.text_tokens": text_tokens, "clap.bench": SHORT}
    with tempfile.TemporaryDirectory() as folder:
        row = run_bench(run.resolved(), settings, Path(folder), command, None)
        found = next(Path(folder).glob("run-*/environment.json"), None)
        if found is None:
            raise UserError(f"the bench run with {text_tokens} text tokens didn't start: {row['note']}")
        environment = json.loads(found.read_text())
    device = {name: environment[name] for name in ("device_name", "device_memory_bytes")}
    return {"text_tokens": text_tokens, "micro_batch": run.micro_batch, **device, **row}


def main(argv: list[str] | None = None) -> None:
    parser = make_parser("memory_evidence", __doc__)
    parser.add_argument("--deepspeed_config", type=Path, required=True, metavar="FILE", help="JSON of a run")
    parser.add_argument("--text_tokens", type=int, nargs="+", metavar="L", help="default: 77 and the most there can be")
    parser.add_argument("--inferred_only", action="store_true", help="run nothing")
    arguments = parser.parse_args(argv)
    run = load_run(arguments.deepspeed_config)
    longest = run.clap.preset().text.max_tokens
    lengths = arguments.text_tokens or sorted({min(77, longest), longest})
    for length in lengths:
        if not 2 <= length <= longest:
            raise UserError(f"--text_tokens {length}: expected 2 to {longest}, the positions a caption can use")
    inferred = [infer(run, length) for length in lengths]
    measured = [] if arguments.inferred_only else [measure(run, length) for length in lengths]
    text = f"Inferred: what the text tower keeps for backward.\n\n{table(INFERRED, inferred)}"
    if measured:
        text += f"\n\nMeasured: the peak of a training step.\n\n{table(MEASURED, measured)}"
    show(arguments.output, text, {"inferred": inferred, "measured": measured})


if __name__ == "__main__":
    run_alone(main)
