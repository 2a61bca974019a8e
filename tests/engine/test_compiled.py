"""Compiled and checkpointed models against the plain one: the micro preset, with Dynamo and AOT Autograd but no code
generator."""

from functools import partial

import pytest
import torch
from torch import Tensor

from clap_ds.config.model import load_preset
from clap_ds.engine import compiled
from clap_ds.engine.compiled import compile_model, compile_statistics, compiled_on_gpu
from clap_ds.model.clap import ClapModel
from clap_ds.model.packed import pack
from tests.model.reference_clap import captions, clips


def outcome(model: ClapModel, *inputs: object) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Embeddings and gradients."""
    audio, text, scale = model(*inputs)
    (scale * (audio[:, 0] * 2 + text[:, 1])).sum().backward()
    grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return [audio.detach(), text.detach()], grads


def micro(**options: object) -> ClapModel:
    torch.manual_seed(0)
    model = ClapModel(load_preset("micro"), drop_path=0.0, text_dropout=0.0, spec_augment=False, **options)
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


@pytest.mark.end_to_end
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("what", ["towers", "step"])
def test_compiled_models_are_the_same_and_whole(what: str, packed: bool) -> None:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    torch._dynamo.utils.clear_compilation_metrics()
    inputs = batch(packed)
    expected = outcome(micro(attention="auto"), *inputs)
    model = micro(attention="auto")
    names = list(model.state_dict())
    compile_model(model, what, backend="aot_eager")
    assert list(model.state_dict()) == names
    for _ in range(2):
        assert_same(outcome(model, *inputs), expected)
    statistics = compile_statistics()
    assert statistics["num_graphs"] == {"towers": 2, "step": 1}[what], statistics
    assert statistics["num_graph_breaks"] == 0, statistics
    assert statistics["num_recompilations"] == 0, statistics


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graphs", [False, True])
@pytest.mark.parametrize("what", ["towers", "step"])
def test_compiled_models_are_the_same_on_a_gpu(what: str, cuda_graphs: bool) -> None:
    torch.compiler.reset()
    inputs = [each.cuda() for each in batch(False) if isinstance(each, Tensor)]
    expected = outcome(micro(attention="auto").cuda(), *inputs)
    model = micro(attention="auto").cuda()
    compile_model(model, what, cuda_graphs=cuda_graphs)
    for _ in range(4):  # the first runs are recorded, the others replayed
        torch.compiler.cudagraph_mark_step_begin()
        assert_same(outcome(model, *inputs), expected)


def test_recompilations_are_counted() -> None:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    torch._dynamo.utils.clear_compilation_metrics()
    model = micro(attention="auto")
    compile_model(model, "towers", backend="eager")
    for num_tokens in (20, 24):
        outcome(model, *batch(False, num_tokens))
    assert compile_statistics()["num_recompilations"] == 1


@pytest.mark.parametrize("packed", [False, True])
def test_checkpointed_blocks_give_the_same_gradients_and_keep_less(packed: bool) -> None:
    inputs = batch(packed)
    expected = outcome(micro(attention="auto"), *inputs)
    assert_same(outcome(micro(attention="auto", checkpoint_activations=("audio", "text")), *inputs), expected)
    kept = []
    for towers in ((), ("audio",), ("text",), ("audio", "text")):
        sizes: list[int] = []

        def note(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            micro(attention="auto", checkpoint_activations=towers)(*inputs)
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

    torch.compiler.reset()
    compiled._compiled.cache_clear()
    torch._dynamo.utils.counters.clear()
    torch._dynamo.utils.clear_compilation_metrics()
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
