"""Compare compiled and checkpointed micro models with the plain one, using Dynamo and AOT Autograd
but no code generator."""

import itertools
import re
from collections.abc import Callable
from pathlib import Path
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
    assert all("graph_break()" in reason for reason in counters["graph_break"])
    # The second part of an id counts a function's compilations.
    ids = [str(metrics.compile_id) for metrics in get_compilation_metrics()]
    num_again = len([compile_id for compile_id in ids if not compile_id.endswith("/0")])
    return counters["stats"]["unique_graphs"], num_again


def train(compile_mode: str, packed: bool) -> dict[str, Tensor]:
    """Return the state after four steps."""
    forget()
    run = settings("fp32", 1)
    engine = engine_of(run, micro())
    batches = list(itertools.islice(batches_of(run), 4))
    if packed:
        # Rows of two lengths.
        for stored, multiple in zip(batches, (8, 64, 8, 64), strict=True):
            stored.packed = pack([(stored.input_ids, stored.attention_mask)], multiple=multiple)
    if compile_mode != "off":
        backend = "aot_eager" if DEVICE.type == "cpu" else "inductor"
        compile_towers(engine.deepspeed, batches[0], compile_mode, cached=False, backend=backend)
    remaining = iter(batches)
    for _ in range(4):
        engine.step(remaining)
    return {name: tensor.cpu().clone() for name, tensor in engine.model.state_dict().items()}


def compare(packed: bool) -> tuple[float, tuple[int, int]]:
    """Return the largest difference of a compiled model's state from a plain one's, and
    `statistics`."""
    plain = train("off", packed)
    compiled = train("towers", packed)
    assert list(compiled) == list(plain)
    difference = max(float((compiled[name] - plain[name]).abs().max()) for name in plain)
    return difference, statistics()


@pytest.mark.end_to_end
def test_two_ranks_compile_no_more_than_one_and_train_alike(two_ranks: RankPool) -> None:
    """Expect four graphs, also for rows of another length; torch's reducer with its small buckets
    adds none."""
    for difference, graphs in two_ranks.run(compare, True):
        # Four fp32 steps that change a weight by at most 1e-3.
        assert difference < 1e-5
        assert graphs == (4, 0)


@pytest.mark.end_to_end
@pytest.mark.parametrize("checkpoint", [False, True])
def test_late_stages_have_gradients_before_early_stages_go_backward(checkpoint: bool) -> None:
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
        tower = HTSAT(config, drop_path=0.1, spec_augment=True, checkpoint=checkpoint)
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


def note_ranks(path: str) -> None:
    """Compile the towers as if ranks' numbers on their host were reversed, and append each rank to
    a file when it begins to compile a tower."""
    forget()

    def note_rank(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        with open(path, "a") as file:
            file.write(str(dist.get_rank()))
        return graph

    engine = engine_of(settings("fp32", 1), micro())
    compile_towers(
        engine.deepspeed,
        batch(),
        "towers",
        cached=False,
        local_rank=1 - dist.get_rank(),
        backend=aot_autograd(fw_compiler=note_rank, bw_compiler=boxed_nop),
    )


def test_first_rank_of_a_host_compiles_before_the_others(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    two_ranks.run(note_ranks, str(tmp_path / "ranks"))
    # One graph for the text tower, and two for the audio tower on several ranks.
    order = (tmp_path / "ranks").read_text()
    assert re.fullmatch("(1+0+){2,3}", order)
    assert order.count("0") == order.count("1")


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


def _train_after_failure(
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
    for stored in batches:
        stored.audio = model.mel(stored.audio)
    torch.manual_seed(dist.get_rank())
    summary = Summary(compiled={})
    if failing:
        backend = counting([], failing)
        summary = compile_towers(
            engine.deepspeed, batches[0], "towers", cached=False, backend=backend
        )
    losses = [float(engine.step(iter([stored]))) for stored in batches]
    return losses, engine.model.state_dict(), summary["compiled"]


@pytest.mark.end_to_end
@pytest.mark.parametrize("failing", ["forward", "backward"])
def test_part_that_fails_to_compile_on_one_rank_runs_uncompiled_on_all(
    two_ranks: RankPool, failing: str
) -> None:
    plain, results = (two_ranks.run(_train_after_failure, direction) for direction in ("", failing))
    problem = "rank 1: no such instruction"
    for (losses, state, compiled), (plain_losses, plain_state, _) in zip(
        results, plain, strict=True
    ):
        assert compiled == {"audio": problem, "text": problem}
        assert losses == plain_losses
        assert all(torch.equal(state[name], tensor) for name, tensor in plain_state.items())


def test_too_little_memory_ends_run_before_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    model = micro()
    calls = list[str]()

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(model.text, "forward", fail)
    engine = SimpleNamespace(module=model, torch_autocast_enabled=lambda: False)
    with pytest.raises(torch.OutOfMemoryError):
        compile_towers(engine, batch(), "towers", cached=False, backend=counting(calls))
    assert not calls


def _uses_world_group() -> bool:
    engine = engine_of(settings("fp32", 1), micro())
    return engine.deepspeed.data_parallel_group is dist.group.WORLD


@pytest.mark.end_to_end
def test_deepspeed_uses_group_of_all_ranks(two_ranks: RankPool) -> None:
    """A copy of the group of all ranks would be another NCCL communicator with its own buffers."""
    assert two_ranks.run(_uses_world_group) == [True, True]


def test_gradients_are_no_concatenations_of_sums() -> None:
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
    concatenations = [node for node in nodes if node.target == torch.ops.aten.cat.default]
    assert not [node for node in concatenations if sums & {*node.all_input_nodes}]


@pytest.mark.gpu
@pytest.mark.parametrize("gpus", ["one_gpu", "two_gpus"])
def test_compiled_models_train_alike_on_gpus(request: pytest.FixtureRequest, gpus: str) -> None:
    for difference, _ in request.getfixturevalue(gpus).run(compare, False):
        # TF32 or another order of sums.
        assert difference < 1e-3


def test_activation_checkpointing_gives_equal_gradients_and_stores_less() -> None:
    stored_bytes = {}
    gradients = {}
    for towers in ((), ("audio",), ("text",), ("audio", "text")):
        sizes = list[int]()
        model = micro(activation_checkpointing=towers)
        note = lambda tensor, sizes=sizes: (sizes.append(tensor.nbytes), tensor)[1]  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            audio, text, scale = model(*batch().model_inputs())
        (scale * (audio[:, 0] * 2 + text[:, 1])).sum().backward()
        stored_bytes[towers] = sum(sizes)
        gradients[towers] = [p.grad for p in model.parameters() if p.grad is not None]
    torch.testing.assert_close(gradients["audio", "text"], gradients[()], rtol=1e-3, atol=1e-5)
    one_tower = stored_bytes[("audio",)], stored_bytes[("text",)]
    assert stored_bytes["audio", "text"] < min(one_tower) < max(one_tower) < stored_bytes[()]
