"""Check that plans depend on the planned GPU, and on nothing that the planning host supports."""

import pytest

from clap_ds.config.settings import load_run
from clap_ds.flop_count.device_specs import gpu_named
from clap_ds.planning.planned_gpu import resolve_for_gpu
from clap_ds.planning.prediction import predict
from clap_ds.utils.errors import UserError
from tests.processes import ROOT

# What torch, Inductor and DeepSpeed ask a host.
PROBES = """
    deepspeed.accelerator.cpu_accelerator.CPU_Accelerator.is_fp16_supported
    deepspeed.accelerator.cpu_accelerator.CPU_Accelerator.is_bf16_supported
    deepspeed.accelerator.cpu_accelerator.CPU_Accelerator.is_triton_supported
    torch.backends.mkldnn.is_available torch.cpu._is_amx_tile_supported torch.cpu._is_avx2_supported
    torch.cpu._is_avx512_bf16_supported torch.cpu._is_avx512_supported torch.cuda.is_available
    torch.cuda.is_bf16_supported torch.utils._triton.has_triton
"""
# The smallest model, with the run's precision and kernels.
SMALL = ["clap.model.preset=micro", "clap.context_length=16", "train_micro_batch_size_per_gpu=8"]
# Others are planned for an H100.
GPUS = {"fine_tune": "a100-sxm-40gb", "htsat_tiny_amp": "rtx-3090", "htsat_tiny_fp16": "v100-16gb"}
# Takes half a minute for all runs.
RUNS = [
    path.stem if path.stem in GPUS else pytest.param(path.stem, marks=pytest.mark.end_to_end)
    for path in sorted((ROOT / "ds_configs").glob("*.json"))
]


@pytest.mark.parametrize("name", RUNS)
def test_packaged_run_is_planned_on_a_host_without_capabilities(monkeypatch, name):
    for probe in PROBES.split():
        monkeypatch.setattr(probe, lambda *_, **__: False)
    # Inductor schedules graphs for half a minute.
    compilation = [] if name == "htsat_tiny" else ["clap.compile=off"]
    gpu = gpu_named(GPUS.get(name, "h100-sxm"))
    report = predict(load_run(name, 1, [*SMALL, *compilation]), gpu, 1, 1, find_micro_batch=False)
    assert report["fits"]
    # A V100 has no flash attention.
    assert gpu.name != "v100-16gb" or "flash attention" not in report["classes"]


@pytest.mark.parametrize(
    ("name", "gpu", "change", "expected"),
    [
        ("fp16", "v100-32gb", "seed=0", ("sdpa", "torch", "torch", "off")),
        ("fp16", "h200", "seed=0", ("auto", "auto", "auto", "auto")),
        ("fp16", "h200", "context_length=200", ("auto", "auto", "torch", "auto")),
        ("fp16", "v100-32gb", "model.mlp_impl=triton", r"mlp_impl: .*V100.* can't run 'triton'"),
        ("amp", "v100-32gb", "seed=0", r"torch_autocast\.enabled: .*V100.* has no bf16; use fp16"),
    ],
)
def test_kernels_are_those_that_the_gpu_would_use(name, gpu, change, expected):
    fields = ["compile", "model.attention_impl", "model.mlp_impl"]
    changes = [*(f"clap.{field}=auto" for field in fields), f"clap.{change}"]
    run = load_run(f"htsat_tiny_{name}", 1, changes)
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            resolve_for_gpu(run, gpu_named(gpu))
        return
    clap = resolve_for_gpu(run, gpu_named(gpu)).clap
    model = clap.model
    kernels = (model.attention_impl, model.mlp_impl, model.text_attention_impl, clap.compile)
    assert kernels == expected
