"""Command: how much memory training needs by caption length, inferred and, on a GPU, measured.

    python -m benchmarks.memory_evidence --deepspeed_config ds_configs/htsat_tiny_amp.json [--text_tokens 77 512]

The published figures count 514 text tokens; whether the published runs can have used them is a question of memory. Inferred:
bytes the text tower keeps for backward, by formula and by counting what autograd saves. Measured: the peak of a short bench
run of the given configuration at each length, in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from clap_ds.config.errors import UserError, run_alone
from clap_ds.config.model import TextConfig
from clap_ds.config.settings import RunSettings, load_run

PUBLISHED_GPU_BYTES = 95e9
"""Memory of a GPU of the published runs."""
BYTES_16_BIT = 34
"""Per token, channel and layer, all in 16 bits, without attention scores (arXiv 2205.05198, section 4.1): inputs of the
query/key/value product 2, of attention 6, of its output layer 2, of the MLP's two layers and its activation 2 + 8 + 8, of two
norms 4, two dropout masks 2."""
BYTES_AUTOCAST = 42
"""The same under autocast with fp32 parameters, as the published runs had: query, key and value each save their own 16-bit
copy of their input (+4), and both norms' inputs are fp32 (+4)."""
DROPOUT_MASK_BYTES = 2
MEASURED_STEPS = {"warmup_steps": 1, "windows": 2, "steps_per_window": 1, "breakdown_steps": 0}


def formula_bytes(text: TextConfig, num_captions: int, text_tokens: int, *, autocast: bool) -> int:
    """Bytes that a text tower's layers keep for backward on a GPU, by the formula."""
    per_channel = BYTES_AUTOCAST if autocast else BYTES_16_BIT
    return per_channel * text.num_layers * text.hidden_size * num_captions * text_tokens


def counted_bytes(text: TextConfig, num_captions: int, text_tokens: int, *, autocast: bool) -> int:
    """Bytes that autograd really saves in the text tower for as many captions, dropout off, embeddings included.

    Counted on fake tensors, from the difference between two and three captions, so that what does not grow with the batch
    (16-bit copies of weights) drops out. Dropout is off because its mask takes 1 byte an element on a GPU but more on a CPU:
    add `DROPOUT_MASK_BYTES` per token, channel and layer.
    """
    return (_saved_bytes(text, 3, text_tokens, autocast) - _saved_bytes(text, 2, text_tokens, autocast)) * num_captions


def _saved_bytes(text: TextConfig, num_captions: int, text_tokens: int, autocast: bool) -> int:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from clap_ds.model.text import TextTower

    with torch.device("meta"):
        tower = TextTower(text, dropout=0.0, from_hub=False)
        tower.compute_every_token()  # as the published runs did
    tower = tower if autocast else tower.bfloat16()
    saved: dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage._cdata] = storage  # held, so that no later storage takes its address
        return tensor

    with FakeTensorMode(allow_non_fake_inputs=True):
        tower.to_empty(device="cpu")
        with (
            torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
            torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast),
        ):
            tower(torch.full((num_captions, text_tokens), 5), None)
    own = {parameter.untyped_storage()._cdata for parameter in tower.parameters()}
    return sum(storage.nbytes() for address, storage in saved.items() if address not in own)


def infer(run: RunSettings, text_tokens: int) -> dict[str, Any]:
    """The text tower's saved activations at the run's micro-batch, in bytes, by formula and by counting."""
    text = run.clap.preset().text
    masks = DROPOUT_MASK_BYTES * text.num_layers * text.hidden_size * run.micro_batch * text_tokens
    found: dict[str, Any] = {"text_tokens": text_tokens, "micro_batch": run.micro_batch}
    for name, autocast in (("bf16", False), ("autocast", True)):
        found[f"{name}_formula_bytes"] = formula_bytes(text, run.micro_batch, text_tokens, autocast=autocast)
        counted = counted_bytes(text, run.micro_batch, text_tokens, autocast=autocast)
        found[f"{name}_counted_bytes"] = counted + masks
    return found


def measure(run: RunSettings, text_tokens: int, folder: Path) -> dict[str, Any]:
    """Peak memory of a few training steps with captions of `text_tokens`, in a process of its own.

    Returns:
        `state` (`completed`, `out_of_memory`, …), `memory_peak_bytes` (None unless completed) and the device's memory.
    """
    config = run.resolved()
    config["clap"] |= {
        "text_tokens": text_tokens,
        "bench": MEASURED_STEPS,
        "output": {"root": str(folder), "label": f"text{text_tokens}"},
    }
    path = folder / f"text{text_tokens}.json"
    path.write_text(json.dumps(config))
    command = [sys.executable, "-m", "clap_ds.bench", "--deepspeed_config", str(path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    directories = list(folder.glob(f"text{text_tokens}-*"))
    if not directories:
        raise UserError(f"the bench run with {text_tokens} text tokens didn't start:\n{done.stdout[-2000:]}")
    summary = json.loads((directories[0] / "summary.json").read_text())
    environment = json.loads((directories[0] / "environment.json").read_text())
    return {
        "text_tokens": text_tokens,
        "micro_batch": run.micro_batch,
        "state": summary["state"],
        "memory_peak_bytes": summary.get("memory_peak_bytes"),
        "device_name": summary["device_name"],
        "device_memory_bytes": environment["device_memory_bytes"],
    }


def verdict(measured: dict[str, Any]) -> str:
    """What one measurement says about the published runs' GPUs."""
    what = f"micro-batch {measured['micro_batch']}, {measured['text_tokens']} text tokens on {measured['device_name']}"
    limit = f"{PUBLISHED_GPU_BYTES / 1e9:.0f} GB of the published runs' GPUs"
    if measured["state"] == "out_of_memory":
        held = measured["device_memory_bytes"]
        size = f" ({held / 1e9:.1f} GB)" if held else ""
        too_much = "more than the" if held and held >= PUBLISHED_GPU_BYTES else "which says nothing of the"
        return f"{what}: out of memory{size}, {too_much} {limit}"
    if measured["state"] != "completed":
        return f"{what}: {measured['state']}, nothing measured"
    peak = measured["memory_peak_bytes"]
    comparison = "fits in the" if peak < PUBLISHED_GPU_BYTES else "does NOT fit in the"
    return f"{what}: peak {peak / 1e9:.1f} GB, {comparison} {limit}"


def main(argv: list[str] | None = None) -> None:
    """Infer, measure, print.

    Raises:
        UserError: a bad configuration or caption length.
    """
    parser = argparse.ArgumentParser(
        prog="benchmarks.memory_evidence", description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    parser.add_argument(
        "--deepspeed_config", type=Path, required=True, metavar="FILE", help="JSON that describes a run"
    )
    parser.add_argument("--text_tokens", type=int, nargs="+", metavar="L", help="default: 77 and the most there can be")
    parser.add_argument("--inferred_only", action="store_true", help="run nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to a file")
    arguments = parser.parse_args(argv)
    run = load_run(arguments.deepspeed_config)
    longest = run.clap.preset().text.max_tokens
    lengths = arguments.text_tokens or sorted({min(77, longest), longest})
    for length in lengths:
        if not 2 <= length <= longest:
            raise UserError(f"--text_tokens {length}: expected 2 to {longest}, the positions a caption can use")
    found: dict[str, Any] = {"inferred": [infer(run, length) for length in lengths], "measured": []}
    for row in found["inferred"]:
        print(
            f"inferred: text tower's saved activations, micro-batch {row['micro_batch']}, {row['text_tokens']} tokens (GB):"
            f" bf16 {row['bf16_formula_bytes'] / 1e9:.1f} by formula, {row['bf16_counted_bytes'] / 1e9:.1f} counted;"
            f" autocast {row['autocast_formula_bytes'] / 1e9:.1f} by formula,"
            f" {row['autocast_counted_bytes'] / 1e9:.1f} counted",
            flush=True,
        )
    with tempfile.TemporaryDirectory() as folder:
        for length in () if arguments.inferred_only else lengths:
            found["measured"].append(measure(run, length, Path(folder)))
            print(f"measured: {verdict(found['measured'][-1])}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


def command() -> None:
    run_alone(main)


if __name__ == "__main__":
    command()
