"""Test a recorded step for settings: resident memory, recomputation, packing and accumulation; and which
kernels Inductor would make on a GPU."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from clap_ds.config.model import load_preset
from clap_ds.config.settings import RunSettings, load_run
from clap_ds.flop_count.analytic import TextLengths, forward_components, recomputed_flops
from clap_ds.model.clap import ClapModel
from clap_ds.planning.inductor import fused_kernels
from clap_ds.planning.step import Step, compiled_kernels, trace_step
from clap_ds.planning.tracing import Operation
from clap_ds.utils.errors import UserError
from tests.planning.test_tracing import sum_flops
from tests.processes import ROOT

WriteRun = Callable[..., Path]
TraceRun = Callable[..., Step]
BATCH = 8
SAMPLES = 48000
# Ids and mask of 16 tokens.
TEXT_BYTES = 2 * BATCH * 16 * 8
_traced: dict[str, Step] = {}


@pytest.fixture
def trace(write_run: WriteRun) -> TraceRun:
    """Return a function that records a step of the micro preset with changes, cached."""

    def trace_cached(world_size: int = 1, **changes: Any) -> Step:
        key = json.dumps([world_size, changes])
        if key not in _traced:
            run = load_run(write_run(**changes))
            _traced[key] = trace_step(run, BATCH, world_size=world_size)
        return _traced[key]

    return trace_cached


def test_resident_memory_depends_on_precision_and_ema(trace):
    autocast = {"enabled": True, "dtype": "bfloat16"}
    bf16 = trace()
    fp32 = trace(bf16={"enabled": False}, torch_autocast=autocast)
    ema = trace(clap={"train": {"ema_decay": 0.9}})
    # bf16: 2 bytes per weight; master and two moments of 4.
    weights = fp32.recorder.at_peak["weights"] - bf16.recorder.at_peak["weights"]
    assert weights == pytest.approx(2 * bf16.num_parameters, rel=0.01)
    for step, num_bytes in ((bf16, 12), (fp32, 8), (ema, 16)):
        state = step.recorder.at_peak["optimizer state"]
        assert state == pytest.approx(num_bytes * step.num_parameters, rel=0.001)
    # One batch in use and one ahead, as int16.
    batch_bytes = BATCH * SAMPLES * 2 + TEXT_BYTES
    assert bf16.recorder.at_peak["batches"] == 2 * batch_bytes


def test_recomputation_trades_memory_for_the_closed_forms_flops(trace):
    # Triton's MLP doesn't recompute its last product.
    model = {"preset": "demo", "mlp_impl": "torch"}
    plain = trace(clap={"model": model}).recorder
    checkpointed = ["audio", "text"]
    recomputing = trace(
        clap={"model": {**model, "activation_checkpointing": checkpointed}}
    ).recorder
    lengths = TextLengths.fixed(16)
    expected = recomputed_flops(load_preset("demo"), lengths, checkpointed, drop_path=0.1)
    assert sum_flops(recomputing) - sum_flops(plain) == pytest.approx(BATCH * expected)
    assert recomputing.at_peak["audio"] < 0.7 * plain.at_peak["audio"]


def test_compiled_towers_store_no_dropout_masks(trace):
    # The embeddings' mask and two of each layer.
    for compiled, num_masks in (("auto", 0), ("off", 5)):
        step = trace(clap={"compile": compiled, "model": {"preset": "micro"}})
        names = [operation.name for operation in step.recorder.operations]
        assert names.count("aten.native_dropout") == num_masks


def test_packed_captions_cost_their_mean_length(trace):
    data = {"source": "synthetic", "caption_lengths": {"4": 3, "16": 1}}
    step = trace(clap={"text_packing": True, "data": data})
    forward = forward_components(load_preset("micro"), TextLengths.fixed(7), "model")
    text = sum_flops(step.recorder, "text", backward=False)
    assert text == BATCH * forward["text_tower"]


def forward_audio_flops(step: Step) -> float:
    return sum(
        repeats * operation.flops
        for operation, repeats in step.work()
        if operation.part == "audio" and not operation.backward
    )


def test_gradcache_stores_its_batches_and_repeats_the_forward_pass(trace):
    single = trace()
    plain = trace(gradient_accumulation_steps=3)
    gradcache = trace(gradient_accumulation_steps=3, clap={"train": {"accumulation": "gradcache"}})
    assert plain.num_samples == gradcache.num_samples == 3 * BATCH
    more_batches = gradcache.recorder.at_peak["batches"] - plain.recorder.at_peak["batches"]
    assert more_batches == 2 * (BATCH * SAMPLES * 2 + TEXT_BYTES)
    assert forward_audio_flops(plain) == 3 * forward_audio_flops(single)
    assert forward_audio_flops(gradcache) == 6 * forward_audio_flops(single)
    # Of Inductor's kernels, one pass is recorded.
    fused = [Operation("fused", "audio", backward, 0, 1) for backward in (False, True)]
    assert gradcache.work(fused)[-2:] == [(fused[0], 6), (fused[1], 3)]
    # Its loss is over the whole batch: one product of all pairs in 32 dimensions.
    products = [op for op in gradcache.recorder.operations if op.part == "loss" and op.flops]
    assert products[0].flops == 2 * (3 * BATCH) ** 2 * 32


def test_loss_and_buckets_grow_with_ranks(trace):
    alone = trace()
    among = trace(world_size=64)
    buckets = among.recorder.at_peak["gradients"] - alone.recorder.at_peak["gradients"]
    assert buckets == pytest.approx(2 * alone.num_parameters, rel=0.01)
    # Log-sum-exps, recomputed similarities and gradients: three products with all features per
    # tower, in the inputs' dtype.
    products = [op for op in among.recorder.operations if op.part == "loss" and op.flops]
    assert sum(op.flops for op in products) == 6 * 2 * BATCH * (64 * BATCH) * 32
    assert {(op.name, op.dtype) for op in products} == {("aten.mm", torch.bfloat16)}


def test_traffic_is_what_a_rank_sends(trace):
    model = ClapModel(load_preset("micro")).bfloat16()
    for norm in model.batch_norms():
        norm.float()
    gradient_bytes = {name: parameter.nbytes for name, parameter in model.named_parameters()}
    # Both stages of this model are early ones, so that only the last norm's gradients come first.
    early = {
        name: num_bytes
        for name, num_bytes in gradient_bytes.items()
        if name.startswith("audio.") and not name.startswith("audio.norm.")
    }
    step = trace(gradient_accumulation_steps=3, clap={"compile": "towers"})
    assert step.gradient_bytes == sum(gradient_bytes.values())
    assert step.last_gradient_bytes == sum(early.values())
    # 32 dimensions in bf16, for each micro-batch.
    assert (step.feature_bytes, step.num_gathers) == (BATCH * 32 * 2, 3)
    bucket = trace(clap={"compile": "off", "bucket_cap_mb": 0.01})
    assert bucket.last_gradient_bytes == round(0.01 * 2**20)
    for clap in ({"gradient_sync": "deepspeed"}, {"train": {"freeze": ["audio"]}}):
        step = trace(clap={"compile": "towers", **clap})
        assert step.last_gradient_bytes == step.gradient_bytes


def test_a_large_vocabulary_counts_in_gradients_and_memory(trace):
    """Every rank sends the gradient of all rows, whichever tokens a batch has."""
    sizes = load_preset("micro").model_dump(mode="json")
    sizes["text"]["vocab_size"] = 250_002
    step = trace(world_size=64, clap={"model": {"preset": sizes}})
    embedding_bytes = 250_002 * 32 * 2
    assert embedding_bytes < step.gradient_bytes < 1.1 * embedding_bytes
    # The reducer's buckets are in addition to the gradients.
    assert step.recorder.at_peak["gradients"] > 2 * embedding_bytes


def test_foreign_optimizer_is_rejected(write_run):
    run = load_run(write_run())
    lion = RunSettings(run.path, run.clap, run.deepspeed | {"optimizer": {"type": "Lion"}})
    with pytest.raises(UserError, match="'Lion'"):
        trace_step(lion, BATCH)


def test_operations_between_products_are_one_kernel_per_direction():
    size = 1024 * 512 * 2
    weights = [torch.empty(512, 512, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]

    def layers(tokens: torch.Tensor) -> torch.Tensor:
        return F.linear(F.gelu(F.linear(tokens, weights[0])) * 2, weights[1])

    # The second call isn't answered from a cache. GELU backward also reads its input.
    for _ in range(2):
        kernels = fused_kernels(layers, torch.empty(1024, 512, dtype=torch.bfloat16))
        assert kernels == [(False, 2 * size), (True, 3 * size)]


@pytest.mark.end_to_end  # takes a quarter of a minute
@pytest.mark.skipif(torch.__version__ < "2.13", reason="older schedulers fuse less")
def test_towers_of_the_published_workload_move_known_bytes():
    """A change of the model that adds a pass over activations fails here."""
    # All sizes are the published ones, but each stage and tower has one layer.
    sizes = load_preset("htsat_tiny_roberta_base").model_dump(mode="json")
    sizes["audio"]["depths"] = [1, 1, 1, 1]
    sizes["text"]["num_layers"] = 1
    changes = [f"clap.model.preset={json.dumps(sizes)}", "clap.model.pretrained_text=false"]
    run = load_run(ROOT / "ds_configs" / "htsat_tiny.json", 1, changes)
    gigabytes = Counter[tuple[str, bool]]()
    for kernel in compiled_kernels(run, 616):
        gigabytes[kernel.part, kernel.backward] += kernel.bytes_moved / 1e9
    expected = {
        ("audio", False): 17.0,
        ("audio", True): 15.3,
        ("text", False): 0.817,
        ("text", True): 2.19,
    }
    assert gigabytes == pytest.approx(expected, rel=0.01)
