"""Check that plans depend on the planned GPU, and on nothing that the planning host supports."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from torch.utils import _triton

from clap_ds.config.settings import load_run
from clap_ds.flop_count.device_specs import gpu_named
from clap_ds.planning import planned_gpu
from clap_ds.planning.inductor import fused_kernels
from clap_ds.planning.planned_gpu import describe_triton, resolve_for_gpu
from clap_ds.planning.prediction import predict
from clap_ds.utils.errors import UserError
from tests.processes import ROOT

FP16: dict[str, Any] = {"bf16": {"enabled": False}, "fp16": {"enabled": True}}
# What torch, Inductor and DeepSpeed ask a host.
PROBES: dict[Any, str] = {
    CPU_Accelerator: "is_fp16_supported is_bf16_supported is_triton_supported",
    torch.cuda: "is_available is_bf16_supported",
    torch.backends.mkldnn: "is_available",
    torch.cpu: "_is_avx2_supported _is_avx512_supported _is_avx512_bf16_supported _is_vnni_supported"
    " _is_amx_tile_supported _is_amx_fp16_supported",
    _triton: "has_triton",
}
# The smallest model, with the run's precision, kernels and accumulation.
SMALL = [
    "clap.model.preset=micro", "clap.context_length=16", "train_micro_batch_size_per_gpu=8",
]  # fmt: skip
UNCOMPILED = "clap.compile=off"
# Others are planned for an H100.
PLANS = {
    "fine_tune": "a100-sxm-40gb",
    "htsat_base_amp": "gh200",
    "htsat_tiny_amp": "rtx-3090",
    "htsat_tiny_deepspeed": "mi300x",
    "htsat_tiny_fp16": "v100-32gb",
}


@pytest.fixture
def host_without_capabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, names in PROBES.items():
        for name in names.split():
            # Versions of torch differ in some.
            monkeypatch.setattr(owner, name, lambda *_, **__: False, raising=False)
    monkeypatch.setattr(CPU_Accelerator, "supported_dtypes", lambda _: [torch.float32])
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict, raising=False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")


def plan_small(config: str, gpu: str, *assignments: str) -> Any:
    """Return the prediction for a packaged run with the smallest model."""
    run = load_run(config, 1, [*SMALL, *assignments])
    return predict(run, gpu_named(gpu), 1, 1, find_micro_batch=False)


def test_fp16_is_planned_for_a_v100_on_a_host_without_it(host_without_capabilities):
    report = plan_small("htsat_tiny_fp16", "v100-16gb")
    kernels = [report[name] for name in ("attention", "mlp", "text_attention", "compile")]
    assert kernels == ["sdpa", "torch", "torch", "off"]
    assert "Triton doesn't support" in report["triton"]
    # Flash attention needs a newer GPU.
    assert "attention" in report["classes"]
    assert "flash attention" not in report["classes"]


def test_fused_kernels_are_those_of_a_gpu_on_a_host_without_capabilities(host_without_capabilities):
    size = 256 * 128 * 2
    tokens = torch.empty(256, 128, dtype=torch.bfloat16, requires_grad=True)
    kernels = fused_kernels(lambda inputs: F.gelu(inputs), tokens)
    assert kernels == [(False, 2 * size), (True, 3 * size)]


@pytest.mark.end_to_end  # takes half a minute
@pytest.mark.parametrize("config", [path.stem for path in (ROOT / "ds_configs").glob("*.json")])
def test_packaged_run_is_planned_on_a_host_without_capabilities(host_without_capabilities, config):
    # Inductor schedules each graph for a quarter of a minute.
    compilation = [] if config == "htsat_tiny" else [UNCOMPILED]
    report = plan_small(config, PLANS.get(config, "h100-sxm"), *compilation)
    assert report["fits"]
    assert report["samples_per_s_per_gpu"]["middle"] > 0


@pytest.mark.parametrize(
    ("gpu", "changes", "expected"),
    [
        ("v100-32gb", [], ("sdpa", "torch", "torch", "off")),
        ("v100-32gb", ["clap.compile=towers"], ("sdpa", "torch", "torch", "off")),
        ("v100-32gb", ["clap.model.attention_impl=matmul"], ("matmul", "torch", "torch", "off")),
        ("h200", [], ("auto", "auto", "auto", "auto")),
        ("h200", ["fp16.enabled=false"], ("auto", "auto", "torch", "auto")),
        ("h200", ["clap.context_length=200"], ("auto", "auto", "torch", "auto")),
    ],
)
def test_kernels_are_those_that_the_gpu_would_use(write_run, gpu, changes, expected):
    path = write_run(**FP16)
    assignments = ['clap.model.preset="demo"', *changes]
    if "clap.context_length=200" in changes:
        assignments[0] = 'clap.model.preset="htsat_tiny_roberta_base"'
    clap = resolve_for_gpu(load_run(path, 1, assignments), gpu_named(gpu)).clap
    model = clap.model
    kernels = (model.attention_impl, model.mlp_impl, model.text_attention_impl)
    assert (*kernels, clap.compile) == expected


@pytest.mark.parametrize(
    ("precision", "change", "message"),
    [
        ({}, "seed=0", r"bf16\.enabled: .*V100.* has no bf16; use fp16"),
        ({"torch_autocast": {"enabled": True}}, "seed=0", r"torch_autocast\.enabled: .* no bf16"),
        ({"fp16": {"enabled": True}}, "model.mlp_impl=triton", r"mlp_impl: .*can't run 'triton'"),
    ],
)
def test_what_a_v100_lacks_is_a_user_error(write_run, precision, change, message):
    path = write_run(**{"bf16": {"enabled": not precision}, **precision})
    with pytest.raises(UserError, match=message):
        resolve_for_gpu(load_run(path, 1, [f"clap.{change}"]), gpu_named("v100-16gb"))


def test_a_plan_without_triton_says_so(monkeypatch):
    monkeypatch.setattr(planned_gpu, "has_triton_package", lambda: False)
    assert "Triton isn't installed here" in describe_triton(gpu_named("h200"))
