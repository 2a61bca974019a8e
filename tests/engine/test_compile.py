"""Compare compiled and checkpointed micro models with the plain one, using Dynamo and AOT Autograd
but no code generator."""

import itertools
from collections.abc import Callable
from types import SimpleNamespace
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
from tests.rank_pool import RankPool
from tests.training.reference_steps import engine_of


def micro(**options: object) -> ClapModel:
    torch.manual_seed(0)
    fixed = {"drop_path": 0.0, "text_dropout": 0.0, "spec_augment": False, "attention": "matmul"}
    model = ClapModel(load_preset("micro"), **{**fixed, **options})
    model.audio.batch_norm.momentum = 0.0  # so that steps don't change what the next one computes
    return model.train()


def batch() -> Any:
    model = load_preset("micro")
    inputs = clips(3, model.audio.num_samples, 0), *captions(3, 20, model.text.vocab_size, seed=0)
    return SimpleNamespace(model_inputs=lambda: inputs, packed=None, device=torch.device("cpu"))


def forget() -> None:
    """Clear what this process has compiled."""
    torch.compiler.reset()
    counters.clear()
    clear_compilation_metrics()


def statistics() -> tuple[int, int]:
    """Return the number of compiled graphs and of recompilations for other shapes. Fails on an
    unwanted graph break."""
    assert all("graph_break()" in each for each in counters["graph_break"])
    anew = [not str(metrics.compile_id).endswith("/0") for metrics in get_compilation_metrics()]
    return counters["stats"]["unique_graphs"], sum(anew)


def trained(what: str, packed: bool) -> tuple[list[str], list[Tensor]]:
    """Return weight names, and weights after four steps."""
    forget()
    run = settings("fp32", 1)
    engine = engine_of(run, micro())
    stored = list(itertools.islice(batches_of(run), 4))
    if packed:
        for number, each in enumerate(stored):
            each.packed = pack(
                [(each.input_ids, each.attention_mask)], multiple=(8, 64)[number % 2]
            )
    if what != "off":
        backend = "aot_eager" if DEVICE.type == "cpu" else "inductor"
        compile_towers(engine.deepspeed, stored[0], what, cached=False, backend=backend)
    batches = iter(stored)
    for _ in range(4):
        engine.step(batches)
    state = engine.model.state_dict()
    return list(state), [state[name].cpu().clone() for name, _ in engine.model.named_parameters()]


def compared(packed: bool) -> tuple[float, tuple[int, int]]:
    """Return the largest difference of a compiled model's weights from a plain one's, and
    `statistics`."""
    (names, plain), (compiled_names, ours) = trained("off", packed), trained("towers", packed)
    assert compiled_names == names
    return max(float((a - b).abs().max()) for a, b in zip(ours, plain, strict=True)), statistics()


@pytest.mark.end_to_end
def test_two_ranks_compile_no_more_than_one_and_train_the_same(two_ranks: RankPool) -> None:
    """Expect four graphs, also for rows of another length; torch's reducer with its small buckets
    adds none."""
    for difference, found in two_ranks.run(compared, True):
        assert difference < 1e-5  # four fp32 steps that change a weight by at most 1e-3
        assert found == (4, 0)


@pytest.mark.end_to_end
@pytest.mark.parametrize("checkpoint", [False, True])
def test_late_stages_have_their_gradients_before_the_early_ones_go_backward(
    checkpoint: bool,
) -> None:
    events = list[str]()
    config = load_preset("micro").audio.model_copy(
        update={"depths": [1, 2, 1, 1], "num_heads": [2, 4, 8, 16]}
    )

    def noted(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        run = boxed_nop(graph, inputs)
        called = lambda arguments: (events.append("backward"), run(arguments))[1]  # noqa: E731
        called._boxed_call = True  # type: ignore[attr-defined]
        return called

    found = list[list[Tensor]]()
    for splits in (False, True):
        forget()
        torch.manual_seed(0)
        tower = HTSAT(config, drop_path=0.1, spec_augment=True, checkpoint=checkpoint)
        tower.splits_graph = splits
        tower.compile(backend=aot_autograd(fw_compiler=boxed_nop, bw_compiler=noted))
        for name, parameter in tower.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: events.append(name))
        tower(torch.randn(3, *config.feature_shape)).square().sum().backward()
        found.append([parameter.grad for parameter in tower.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    whole, late, early = " ".join(events).split("backward")[1:]
    names = {name for name, _ in tower.named_parameters()}
    assert {*whole.split()} == names
    assert {*late.split()} == {
        name for name in names if name.startswith(("stages.2", "stages.3", "norm"))
    }
    assert {*early.split()} == names - {*late.split()}


def counting(calls: list[str], failing: str = "") -> Callable[..., Any]:
    """Return a backend that records the graphs it gets, and on rank 1 can't compile those of one
    direction."""

    def compiler(direction: str) -> Callable[..., Any]:
        def compile_graph(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
            calls.append(direction)
            if direction == failing and dist.get_rank() == 1:
                raise RuntimeError("no such instruction\nat line 3")
            return boxed_nop(graph, inputs)

        return compile_graph

    return aot_autograd(fw_compiler=compiler("forward"), bw_compiler=compiler("backward"))


def _trained_after_a_failure(
    failing: str,
) -> tuple[list[float], dict[str, Tensor], dict[str, str | None]]:
    """Return losses of three steps of a stochastic model on log-mel features, its state after them,
    and what couldn't be compiled."""
    forget()
    run = settings("bf16", 1)
    model = micro(drop_path=0.5, text_dropout=0.1, spec_augment=True)
    model.audio.batch_norm.momentum = 0.1
    engine = engine_of(run, model)
    batches = list(itertools.islice(batches_of(run), 3))
    for each in batches:
        each.audio = model.mel(each.audio)
    torch.manual_seed(dist.get_rank())
    found = Summary(compiled={})
    if failing:
        found = compile_towers(
            engine.deepspeed, batches[0], "towers", cached=False, backend=counting([], failing)
        )
    losses = [float(engine.step(iter([each]))) for each in batches]
    return losses, engine.model.state_dict(), found["compiled"]


@pytest.mark.end_to_end
@pytest.mark.parametrize("failing", ["forward", "backward"])
def test_what_one_rank_cannot_compile_runs_on_all_as_if_never_tried(
    two_ranks: RankPool, failing: str
) -> None:
    plain, results = (two_ranks.run(_trained_after_a_failure, each) for each in ("", failing))
    why = "rank 1: no such instruction"
    for (losses, state, found), (plain_losses, plain_state, _) in zip(results, plain, strict=True):
        assert found == {"audio": why, "text": why}
        assert losses == plain_losses
        assert all(torch.equal(state[name], tensor) for name, tensor in plain_state.items())


def test_too_little_memory_is_found_before_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    model = micro()
    calls = list[str]()

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(model.text, "forward", fail)
    engine = SimpleNamespace(module=model, torch_autocast_enabled=lambda: False)
    with pytest.raises(torch.OutOfMemoryError):
        compile_towers(engine, batch(), "towers", cached=False, backend=counting(calls))
    assert not calls


def _takes_the_group() -> bool:
    engine = engine_of(settings("fp32", 1), micro())
    return engine.deepspeed.data_parallel_group is dist.group.WORLD


@pytest.mark.end_to_end
def test_deepspeed_creates_no_group_of_its_own(two_ranks: RankPool) -> None:
    """A copy of the group of all ranks would be another NCCL communicator with its own buffers."""
    assert two_ranks.run(_takes_the_group) == [True, True]


def test_no_gradient_is_a_concatenation_of_sums() -> None:
    """Such a sum, as of a parameter that is split in the forward pass, may get wrong values from
    Inductor's mix-order reduction (pytorch #193061)."""
    forget()
    model = micro()
    graphs = list[torch.fx.GraphModule]()

    def keep(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return boxed_nop(graph, inputs)

    engine = SimpleNamespace(module=model, torch_autocast_enabled=lambda: False)
    backend = aot_autograd(fw_compiler=boxed_nop, bw_compiler=keep)
    compile_towers(engine, batch(), "towers", cached=False, backend=backend)
    nodes = [node for graph in graphs for node in graph.graph.nodes]
    sums = {node for node in nodes if node.target == torch.ops.aten.sum.dim_IntList}
    assert len(graphs) == 2
    assert len(sums) > 20
    assert not [
        node
        for node in nodes
        if node.target == torch.ops.aten.cat.default and sums & {*node.all_input_nodes}
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("gpus", ["one_gpu", "two_gpus"])
def test_compiled_models_train_the_same_on_gpus(request: pytest.FixtureRequest, gpus: str) -> None:
    for difference, _ in request.getfixturevalue(gpus).run(compared, False):
        assert difference < 1e-3  # TF32 or another order of sums


def test_checkpointed_blocks_give_the_same_gradients_and_keep_less() -> None:
    kept = list[int]()
    found = list[list[Tensor]]()
    for towers in ((), ("audio",), ("text",), ("audio", "text")):
        sizes = list[int]()
        model = micro(activation_checkpointing=towers)
        note = lambda tensor, sizes=sizes: (sizes.append(tensor.nbytes), tensor)[1]  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            audio, text, scale = model(*batch().model_inputs())
        (scale * (audio[:, 0] * 2 + text[:, 1])).sum().backward()
        kept.append(sum(sizes))
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(found[3], found[0], rtol=1e-3, atol=1e-5)
    assert kept[3] < min(kept[1:3]) < max(kept[1:3]) < kept[0]
