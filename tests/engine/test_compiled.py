"""Compiled and checkpointed models against the plain one: the micro preset, with Dynamo and AOT Autograd but no code
generator."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from clap_ds.config.model import load_preset
from clap_ds.engine import compiled
from clap_ds.engine import engine as engine_module
from clap_ds.engine.compiled import compile_model, compile_statistics, compiled_on_gpu
from clap_ds.engine.engine import ClapEngine
from clap_ds.model.clap import ClapModel
from clap_ds.model.packed import pack
from clap_ds.record.clock import PhaseTimer
from tests.engine.test_engine import DEVICE, _batches, _settings
from tests.model.reference_clap import captions, clips
from tests.rank_pool import RankPool


def outcome(model: ClapModel, *inputs: object) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Embeddings and gradients."""
    audio, text, scale = model(*inputs)
    (scale * (audio[:, 0] * 2 + text[:, 1])).sum().backward()
    grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return [audio.detach(), text.detach()], grads


def micro(**options: object) -> ClapModel:
    torch.manual_seed(0)
    fixed = {"drop_path": 0.0, "text_dropout": 0.0, "spec_augment": False}
    model = ClapModel(load_preset("micro"), **{**fixed, **options})
    model.audio.batch_norm.momentum = 0.0  # so that steps don't change what the next one computes
    return model.train()


def batch(packed: bool, num_tokens: int = 20) -> tuple[object, ...]:
    model = load_preset("micro")
    input_ids, mask = captions(3, num_tokens, model.text.vocab_size, seed=0)
    waveforms = clips(3, model.audio.num_samples, 0)
    if not packed:
        return waveforms, input_ids, mask
    row, packing = pack([(input_ids, mask)])
    return waveforms, row, None, packing


def assert_same(got: tuple, expected: tuple) -> None:
    for one, other in zip(got[0], expected[0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert got[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        error = (got[1][name] - gradient).norm()
        assert error <= 1e-3 * gradient.norm() + 1e-5, name


def forget() -> None:
    """Nothing was compiled in this process."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    torch._dynamo.utils.clear_compilation_metrics()


def traced_alone(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., list[Tensor]]:
    """A backend whose graphs aren't run and give zeros."""
    outputs = [node.meta["example_value"] for node in graph.graph.output_node().args[0]]
    return lambda *arguments: [torch.zeros(each.shape, dtype=each.dtype) for each in outputs]


@pytest.mark.parametrize("attention", ["sdpa", "matmul", "triton"])
def test_front_end_and_towers_are_a_graph_each_with_any_kernel(attention: str) -> None:
    if attention == "triton":
        pytest.importorskip("triton")
    forget()
    model = micro(attention=attention, drop_path=0.5, text_dropout=0.1, spec_augment=True)
    compile_model(model, "towers", backend=traced_alone)
    model(*batch(False))
    statistics = compile_statistics()
    assert (statistics["num_graphs"], statistics["graph_breaks"], statistics["num_recompilations"]) == (3, {}, 0)
    if attention == "sdpa":
        model(*batch(False, num_tokens=24))
        assert compile_statistics()["num_recompilations"] == 1


@pytest.mark.end_to_end
@pytest.mark.parametrize("packed", [False, True])
def test_compiled_models_are_the_same(packed: bool) -> None:
    forget()
    inputs = batch(packed)
    expected = outcome(micro(attention="matmul"), *inputs)
    model = micro(attention="matmul")
    names = list(model.state_dict())
    compile_model(model, "towers", backend="aot_eager")
    assert list(model.state_dict()) == names
    for _ in range(2):
        assert_same(outcome(model, *inputs), expected)
    statistics = compile_statistics()
    assert (statistics["num_graphs"], statistics["graph_breaks"], statistics["num_recompilations"]) == (3, {}, 0)


def trained(what: str, cuda_graphs: bool, packed: bool) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """Weights after four steps, and what was compiled after each of them and then by evaluating and a fifth step."""
    forget()
    run = _settings("fp32", 1, bucket_mb=0.05)
    run.clap = run.clap.model_copy(update={"compile": what, "cuda_graphs": cuda_graphs})
    model = micro(attention="matmul")
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE.type == "cpu":
            patch.setattr(engine_module, "compile_model", partial(compile_model, backend="aot_eager"))
        engine = ClapEngine(run, model, DEVICE)
    stored = [next(source) for source in [_batches(run)] for _ in range(6)]
    if packed:
        for number, each in enumerate(stored):
            each.packed = pack([(each.input_ids, each.attention_mask)], multiple=(8, 64)[number % 2])
    batches, timer, found = itertools.cycle(stored), PhaseTimer(DEVICE, instrumented=False), []
    for _ in range(4):
        engine.step(batches, timer)
        found.append(compile_statistics())
    weights = [parameter.detach().cpu().clone() for parameter in model.parameters()]
    waveforms, *caption_inputs = next(batches).model_inputs()
    with torch.no_grad():
        for _ in range(2):
            model.eval().encode_audio(waveforms)
            model.encode_text(*caption_inputs)
    found.append(compile_statistics())
    model.train()
    engine.step(batches, timer)
    return weights, [*found, compile_statistics()]


def compared(*arguments: Any) -> tuple[float, list[dict[str, Any]]]:
    """Largest difference of a compiled model's weights from a plain one's, and what was compiled when."""
    (ours, found), (plain, _) = trained("towers", *arguments), trained("off", *arguments)
    return max(float((a - b).abs().max()) for a, b in zip(ours, plain, strict=True)), found


@pytest.mark.end_to_end
def test_two_ranks_compile_no_more_than_one_and_train_the_same(two_ranks: RankPool) -> None:
    for difference, (first, *_, last, evaluated, after) in two_ranks.run(compared, False, True):
        assert difference < 1e-5  # four steps of at most 1e-3 a weight, in fp32
        assert first["num_graphs"] == 3
        # For rows of another length, which come when the reducer is attached: its buckets are far below 1 MB.
        assert last["num_recompilations"] == 1
        assert evaluated["num_recompilations"] == last["num_recompilations"] + 3
        assert after["num_recompilations"] == evaluated["num_recompilations"]
        assert after["graph_breaks"] == {}


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_compiled_models_train_the_same_on_a_gpu(one_gpu: RankPool, cuda_graphs: bool) -> None:
    ((difference, _),) = one_gpu.run(compared, cuda_graphs, False)
    assert difference < 1e-3  # TF32 or another order of sums


@pytest.mark.parametrize("packed", [False, True])
def test_checkpointed_blocks_give_the_same_gradients_and_keep_less(packed: bool) -> None:
    inputs = batch(packed)
    expected = outcome(micro(attention="matmul"), *inputs)
    assert_same(outcome(micro(attention="matmul", checkpoint_activations=("audio", "text")), *inputs), expected)
    kept = []
    for towers in ((), ("audio",), ("text",), ("audio", "text")):
        sizes: list[int] = []

        def note(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            micro(attention="matmul", checkpoint_activations=towers)(*inputs)
        kept.append(sum(sizes))
    nothing, audio, text, both = kept
    assert both < min(audio, text) < max(audio, text) < nothing


def _twice(x: Tensor) -> Tensor:
    return x * 2


@pytest.mark.parametrize("works", [True, False])
def test_functions_beside_the_model_are_compiled_on_a_gpu_or_run_as_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], works: bool
) -> None:
    used = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        used.append(len(inputs))
        if not works:
            raise RuntimeError("no C compiler")
        return graph

    forget()
    compiled._compiled.cache_clear()
    assert torch.equal(compiled_on_gpu(_twice, torch.ones(3)), torch.full((3,), 2.0))
    assert not used
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    monkeypatch.setattr(Tensor, "is_cuda", True)
    for size in (3, 3, 5):
        assert torch.equal(compiled_on_gpu(_twice, torch.ones(size)), torch.full((size,), 2.0))
    assert len(used) == (2 if works else 1)
    assert capsys.readouterr().out.count("_twice can't be compiled") == (0 if works else 1)
    statistics = compile_statistics()
    assert (statistics["num_graphs"], statistics["num_recompilations"]) == (0, 0), "not the model's"
