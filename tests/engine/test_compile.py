"""Compare compiled and checkpointed micro models with the plain one, using Dynamo and AOT Autograd
but no code generator."""

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics

from clap_ds.config.model import load_preset
from clap_ds.engine.compile import compile_towers
from clap_ds.model.clap import ClapModel
from clap_ds.model.htsat import HTSAT
from clap_ds.model.packed import pack
from clap_ds.run_records.schema import Summary
from tests.engine.test_engine import DEVICE, batches_of, settings
from tests.model.reference_clap import captions, clips
from tests.training.reference_steps import engine_of


def micro(**options: object) -> ClapModel:
    torch.manual_seed(0)
    sizes = load_preset("micro")
    # With fewer layers, which are compiled faster.
    audio = sizes.audio.model_copy(update={"depths": [1, 1]})
    text = sizes.text.model_copy(update={"num_layers": 1})
    fixed = {"drop_path": 0.0, "text_dropout": 0.0, "spec_augment": False, "attention": "matmul"}
    model = ClapModel(
        sizes.model_copy(update={"audio": audio, "text": text}), **{**fixed, **options}
    )
    model.audio.batch_norm.momentum = 0.0  # so that steps don't change what the next one computes
    return model.train()


def forget() -> None:
    """Clear what this process has compiled."""
    torch.compiler.reset()
    counters.clear()
    clear_compilation_metrics()


def statistics() -> tuple[int, int]:
    """Return the number of compiled graphs and of recompilations for other shapes. Fails on an
    unwanted graph break."""
    assert all("graph_break()" in reason for reason in counters["graph_break"])
    # The second part of an id counts a function's compilations.
    ids = [str(metrics.compile_id) for metrics in get_compilation_metrics()]
    num_again = len([compile_id for compile_id in ids if not compile_id.endswith("/0")])
    return counters["stats"]["unique_graphs"], num_again


def train(compiles: bool, packed: bool) -> dict[str, Tensor]:
    """Return the state after four steps."""
    forget()
    run = settings("fp32", 1)
    engine = engine_of(run, micro())
    batches = list(itertools.islice(batches_of(run), 4))
    if packed:
        # Rows of two lengths.
        for stored, multiple in zip(batches, (8, 64, 8, 64), strict=True):
            stored.packed = pack([(stored.input_ids, stored.attention_mask)], multiple=multiple)
    if compiles:
        backend = "aot_eager" if DEVICE.type == "cpu" else "inductor"
        compile_towers(engine.deepspeed, batches[0], "towers", cached=False, backend=backend)
    remaining = iter(batches)
    for _ in range(4):
        engine.step(remaining)
    return {name: tensor.cpu().clone() for name, tensor in engine.model.state_dict().items()}


def compare(packed: bool) -> tuple[float, tuple[int, int]]:
    """Return the largest difference of a compiled model's state from a plain one's, and
    `statistics`."""
    plain = train(False, packed)
    compiled = train(True, packed)
    difference = max(float((compiled[name] - plain[name]).abs().max()) for name in plain)
    return difference, statistics()


@pytest.mark.end_to_end
def test_two_ranks_compile_no_more_than_one_and_train_alike(two_ranks):
    """Expect four graphs, also for rows of another length: the front end, HTSAT in two, of which the
    late one's gradients are sent first, and the text tower."""
    for difference, graphs in two_ranks.run(compare, True):
        # Four fp32 steps that change a weight by at most 1e-3.
        assert difference < 1e-5
        assert graphs == (4, 0)


@pytest.mark.end_to_end
def test_late_stages_have_gradients_before_early_stages_go_backward():
    events = list[str]()
    config = load_preset("micro").audio.model_copy(
        update={"depths": [1, 2, 1, 1], "num_heads": [2, 4, 8, 16]}
    )

    def noted(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        run = boxed_nop(graph, inputs)
        called = lambda arguments: (events.append("backward"), run(arguments))[1]  # noqa: E731
        called._boxed_call = True  # type: ignore[attr-defined]
        return called

    gradients = list[list[Tensor]]()
    for splits in (False, True):
        forget()
        torch.manual_seed(0)
        tower = HTSAT(config, drop_path=0.1, spec_augment=True)
        tower.splits_graph = splits
        tower.compile(backend=aot_autograd(fw_compiler=boxed_nop, bw_compiler=noted))
        for name, parameter in tower.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: events.append(name))
        tower(torch.randn(3, *config.feature_shape)).square().sum().backward()
        gradients.append([parameter.grad for parameter in tower.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))
    whole, late, early = " ".join(events).split("backward")[1:]
    names = {name for name, _ in tower.named_parameters()}
    assert {*whole.split()} == names
    late_names = {name for name in names if name.startswith(("stages.2", "stages.3", "norm"))}
    assert {*late.split()} == late_names
    assert {*early.split()} == names - late_names


def failing_on_rank_1() -> Callable[..., Any]:
    """Return a backend that can't compile backward graphs on rank 1."""

    def fail(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        if dist.get_rank() == 1:
            raise RuntimeError("no such instruction\nat line 3")
        return boxed_nop(graph, inputs)

    return aot_autograd(fw_compiler=boxed_nop, bw_compiler=fail)


def note_ranks(path: str) -> None:
    """Compile the towers as if ranks' numbers on their host were reversed, and append each rank to
    a file when it begins to compile a tower."""
    forget()

    def note_rank(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        with open(path, "a") as file:
            file.write(str(dist.get_rank()))
        return graph

    run = settings("fp32", 1)
    engine = engine_of(run, micro())
    compile_towers(
        engine.deepspeed,
        next(batches_of(run)),
        "towers",
        cached=False,
        local_rank=1 - dist.get_rank(),
        backend=aot_autograd(fw_compiler=note_rank, bw_compiler=boxed_nop),
    )


@pytest.mark.end_to_end
def test_first_rank_of_a_host_compiles_before_the_others(two_ranks, tmp_path):
    two_ranks.run(note_ranks, str(tmp_path / "ranks"))
    # One graph for the text tower, and two for the audio tower on several ranks.
    order = (tmp_path / "ranks").read_text()
    assert re.fullmatch("(1+0+){2,3}", order)
    assert order.count("0") == order.count("1")


def _train_after_failure(fails: bool) -> tuple[list[float], dict[str, Any]]:
    """Return losses of three steps of a stochastic model on log-mel features, and what couldn't be
    compiled."""
    forget()
    run = settings("bf16", 1)
    model = micro(drop_path=0.5, text_dropout=0.1, spec_augment=True)
    model.audio.batch_norm.momentum = 0.1
    engine = engine_of(run, model)
    batches = list(itertools.islice(batches_of(run), 3))
    for stored in batches:
        stored.audio = model.mel(stored.audio)
    torch.manual_seed(dist.get_rank())
    summary = Summary(compiled={})
    if fails:
        backend = failing_on_rank_1()
        summary = compile_towers(
            engine.deepspeed, batches[0], "towers", cached=False, backend=backend
        )
    return [float(engine.step(iter([stored]))) for stored in batches], summary["compiled"]


@pytest.mark.end_to_end
def test_part_that_fails_to_compile_on_one_rank_runs_uncompiled_on_all(two_ranks):
    plain, results = (two_ranks.run(_train_after_failure, fails) for fails in (False, True))
    problem = "rank 1: no such instruction"
    for (losses, compiled), (plain_losses, _) in zip(results, plain, strict=True):
        assert compiled == {"audio": problem, "text": problem}
        assert losses == plain_losses


@pytest.mark.gpu
@pytest.mark.parametrize("gpus", ["one_gpu", "two_gpus"])
def test_compiled_models_train_alike_on_gpus(request, gpus):
    for difference, _ in request.getfixturevalue(gpus).run(compare, False):
        # TF32 or another order of sums.
        assert difference < 1e-3


def test_activation_checkpointing_gives_equal_gradients_and_stores_less():
    batch = clips(3, 48000, seed=0), *captions(3, 20, 512, seed=0)
    stored_bytes = []
    gradients = []
    for towers in ((), ("audio",), ("audio", "text")):
        sizes = list[int]()
        model = micro(activation_checkpointing=towers)
        note = lambda tensor, sizes=sizes: (sizes.append(tensor.nbytes), tensor)[1]  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            audio, text, _ = model(*batch)
        (audio @ text.T)[0].sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
        stored_bytes.append(sum(sizes))
    torch.testing.assert_close(gradients[-1], gradients[0], rtol=1e-3, atol=1e-5)
    assert stored_bytes == sorted(set(stored_bytes), reverse=True)
