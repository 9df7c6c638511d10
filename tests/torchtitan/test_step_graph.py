"""`cuda_graph` in torchtitan's trainer: which steps are captured and replayed, and which settings
forbid it.

On the CPU a graph runs the step again for what is in the memory of its inputs, and writes gradients
where the captured step has left them. tests/gpu/test_step_graph.py has CUDA graphs.
"""

import contextlib
import gc
import logging
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import gloo
import pytest
import torch
from health_runs import Recorder
from peers import use_peers
from titan import (
    AC,
    BOTH,
    GROUPED_MM,
    LINEAR,
    ONE_BLOCK,
    batch,
    build,
    convert,
    job,
    one_process,
    parse,
    toml,
    trainer,
    training,
)
from torchtitan.distributed import ParallelDims

from titan_fp8.fsdp import runs_on
from titan_fp8.fsdp.sharded_weight import gathers_of
from titan_fp8.host import gpu_failure
from titan_fp8.host.torchtitan_0_2 import captured_step, step_graph
from titan_fp8.host.torchtitan_0_2.captured_step import Batch, Divisor, ModelTensors
from titan_fp8.host.torchtitan_0_2.moe import GatherMoE
from titan_fp8.ops import observe
from titan_fp8.patches import Target
from titan_fp8.torchtitan_0_2 import cuda_graph

pytestmark = pytest.mark.usefixtures("fresh_torchtitan")

KEY = (f"--{LINEAR}.cuda_graph",)


class Graph:
    """In place of a CUDA graph. A replay leaves what Python knows of gathered weights as it was.

    A capture would not communicate. Here it does, so the replay that comes next must not.
    """

    model: torch.nn.Module
    replays = 0

    def __init__(self, run, stream, pool):
        self.run = run
        self.parameters = [p for p in Graph.model.parameters() if p.requires_grad]
        before = [p.grad if p.grad is None else p.grad.clone() for p in self.parameters]
        self.adds = before[0] is not None
        self.gathers = [g for m in Graph.model.modules() for g in gathers_of(m).values()]
        self.fresh = [gather.fresh for gather in self.gathers]
        run()
        self.gradients = [p.grad for p in self.parameters]
        self.first = [gradient.clone() for gradient in self.gradients]
        for gradient, value in zip(self.gradients, before):  # A capture computes nothing.
            gradient.fill_(float("nan")) if value is None else gradient.copy_(value)

    def replay(self):
        Graph.replays += 1
        if self.first:
            for gradient in self.gradients:
                gradient.copy_(self.first.pop(0))
            return
        fresh = [gather.fresh for gather in self.gathers]
        self.know(self.fresh)
        if not self.adds:
            for p in self.parameters:
                p.grad = None
        self.run()
        if not self.adds:
            for p, gradient in zip(self.parameters, self.gradients):
                gradient.copy_(p.grad)
                p.grad = None
        self.know(fresh)

    def know(self, fresh):
        for gather, is_fresh in zip(self.gathers, fresh):
            gather.fresh = is_fresh


def simulate(monkeypatch) -> list[str]:
    """Lets steps be captured; returns the list of the places where the CPU waits."""
    places: list[str] = []
    use_peers(monkeypatch)
    monkeypatch.setattr(captured_step, "Graph", Graph)
    monkeypatch.setattr(step_graph, "waits", lambda: contextlib.nullcontext(places))
    for name in ("graph_pool_handle", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, object)
    monkeypatch.setattr(Graph, "replays", 0)
    return places


@pytest.fixture
def waiting(monkeypatch):
    """`simulate` in one process."""
    places = simulate(monkeypatch)
    with one_process():
        yield places
    observe(None)
    runs_on(None)


def train(config) -> Recorder:
    """Trains, and records the loss and the norm of the gradients of each step."""
    recorder = Recorder()
    with trainer(config) as t:
        Graph.model = t.model_parts[0]
        t.metrics_processor.logger = recorder
        t.train()
    return recorder


def results(recorder: Recorder) -> list[tuple[float, ...]]:
    names = "loss_metrics/global_avg_loss", "grad_norm", "validation_metrics/loss"
    return [tuple(metrics.get(name) for name in names) for metrics in recorder.steps.values()]


@pytest.mark.parametrize(
    "flags, replays",
    [
        ((), 3),
        (("--training.global_batch_size", 4), 6),
        ((f"--{LINEAR}.recipe", "bf16", f"--{LINEAR}.host_speedups", "True"), 3),
        ((f"--{LINEAR}.health_freq", 5), 2),
    ],
    ids=["", "accumulation", "bf16", "health_freq"],
)
def test_training_is_the_same(waiting, text, tmp_path, monkeypatch, flags, replays):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    flags = (
        *training(text, tmp_path), "--training.steps", 6, *flags,
        *("--validation.enable", "--validation.freq", 4, "--validation.steps", 1),
        *("--validation.dataset", "c4_test", "--validation.dataset_path", text / "corpus"),
        *("--validation.local_batch_size", 2, "--validation.seq_len", 96),
    )  # fmt: skip
    expected = results(train(parse(tmp_path, toml("llama3", (LINEAR,)), *flags)))
    assert not Graph.replays
    found = results(train(parse(tmp_path, toml("llama3", (LINEAR,)), *flags, *KEY)))
    assert found == expected
    assert Graph.replays == replays


FSDP = ("--parallelism.data_parallel_shard_degree", 2)
EP = ("--parallelism.expert_parallel_degree", 2, *FSDP)
FP8 = (f"--{GROUPED_MM}.exchange", "fp8")


def check_the_same(rank, folder: Path, text: Path, config: str, flags, run, replays: int) -> None:
    """On one of two ranks `run` returns the same tensors of a trainer with and without a graph."""
    folder = folder / str(rank)
    folder.mkdir()
    runs = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        simulate(monkeypatch)
        for key in ((), KEY):
            with trainer(parse(folder, config, *training(text, folder), *flags, *key)) as t:
                Graph.model = t.model_parts[0]
                runs.append(run(t, Graph.model))
        assert Graph.replays == replays
    # The CPU divides by a number, and does not multiply by the inverse.
    for want, got in zip(*runs, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-6)


def train_ranks(rank: int, folder: Path, text: Path) -> None:
    """With evaluations, after which FSDP2 leaves weights gathered."""

    def run(t, model) -> list[torch.Tensor]:
        batches, found = t.batch_generator(t.dataloader), []
        for t.step in range(1, 6):
            t.train_step(batches)
            found += [p.grad.to_local().clone() for p in model.parameters()]
            with torch.no_grad():
                found.append(model(batch(t)[0]["input"]))
        return found

    flags = *EP, *ONE_BLOCK
    check_the_same(rank, folder, text, toml("deepseek_v3"), flags, run, 2)


def test_sharded_training_is_the_same(tmp_path, text):
    gloo.spawn(train_ranks, 2, tmp_path, text)


def run_batch(t, seed: int, length: int = 96) -> torch.Tensor:
    """The loss, whose gradients are added to those there are."""
    inputs, labels = batch(t, seed)
    inputs, labels = {"input": inputs["input"][:, :length]}, labels[:, :length]
    tokens = torch.tensor(float(labels.numel()))
    return t.forward_backward_step(input_dict=inputs, labels=labels, global_valid_tokens=tokens)


def gradients(t, seed: int, length: int = 96) -> list[torch.Tensor]:
    """The loss, and its gradient of each parameter that is trained."""
    t.optimizers.zero_grad()
    loss = run_batch(t, seed, length)
    gradients = [p.grad for p in t.model_parts[0].parameters()]
    return [loss.detach(), *(g.clone() for g in gradients if g is not None)]


def step_of_another_form(rank: int, folder: Path, text: Path) -> None:
    """Rank 1 gets a batch of another shape after an evaluation, and the others replay."""

    def run(t, model) -> list[torch.Tensor]:
        for step in range(1, 6):
            gradients(t, step)
        with torch.no_grad():
            model(batch(t)[0]["input"])
        last = gradients(t, 6, 64 if rank else 96)
        return [g.to_local() if hasattr(g, "to_local") else g for g in last]

    config, replays = toml("llama3", (LINEAR,)), 2 if rank else 3
    check_the_same(rank, folder, text, config, FSDP, run, replays)


def test_ranks_that_replay_and_ranks_that_do_not_run_together(tmp_path, text):
    gloo.spawn(step_of_another_form, 2, tmp_path, text, timeout=200)


def accumulate(rank: int, folder: Path, text: Path) -> None:
    """Two batches a step. Rank 1 warms up for longer, because its shapes change."""

    def run(t, model) -> list[torch.Tensor]:
        found = []
        for step in range(8):
            t.optimizers.zero_grad()
            for last in (False, True):
                # FSDP2 keeps the gradients of the first batch.
                model.set_requires_gradient_sync(step < 7 or last)
                is_short = rank == 1 and (step < 2 or step == 6 and last)
                run_batch(t, 2 * step + last, 64 if is_short else 96)
            found += [p.grad.to_local().clone() for p in model.parameters()]
            if step != 2:  # So the first step that is captured finds weights that have not changed.
                t.optimizers.step()
        return found

    check_the_same(rank, folder, text, toml("llama3", (LINEAR,)), FSDP, run, 8 - 3 * rank)


def both_ways(run: Callable, folder: Path, text: Path) -> Iterator[tuple[Any, Any]]:
    """Pairs of what `run` of a trainer returns without the graph and with it."""
    results = []
    for key in ((), KEY):
        config = parse(folder, toml("llama3", (LINEAR,)), *training(text, folder), *key)
        with trainer(config) as t:
            Graph.model = t.model_parts[0]
            results.append(run(t))
    return zip(*results, strict=True)


def test_accumulation_on_ranks_is_the_same(tmp_path, text):
    gloo.spawn(accumulate, 2, tmp_path, text, timeout=200)


def test_a_batch_of_another_shape_runs_eagerly(waiting, text, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    lengths = 96, 96, 96, 96, 64, 32, 32, 96, 96  # 32 is not captured before it has run.
    pairs = both_ways(
        lambda t: [gradients(t, *each) for each in enumerate(lengths)], tmp_path, text
    )
    for expected, found in pairs:
        assert all(map(torch.equal, expected, found))
    assert Graph.replays == 3
    assert caplog.text.count("are a CUDA graph now") == 3
    assert caplog.text.count("and so does a batch of another form than the one before") == 1


def test_a_step_of_a_new_form_is_not_searched_for_waits(waiting, text, tmp_path):
    with trainer(parse(tmp_path, toml("llama3", (LINEAR,)), *training(text, tmp_path), *KEY)) as t:
        Graph.model = t.model_parts[0]
        for seed, length in enumerate((96, 96, 64, 64, 64)):
            waiting[:] = ["compile.py:7"] if seed == 2 else []
            gradients(t, seed, length)
    assert Graph.replays == 1


def test_shapes_in_turns_run_eagerly(waiting, text, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    with trainer(parse(tmp_path, toml("llama3", (LINEAR,)), *training(text, tmp_path), *KEY)) as t:
        Graph.model = t.model_parts[0]
        for seed in range(6):
            gradients(t, seed, 64 if seed % 2 else 96)
        assert not Graph.replays
        for seed in range(3):
            gradients(t, seed)
    assert Graph.replays == 1
    assert caplog.text.count("and so does a batch of another form than the one before") == 1


def test_parameters_may_be_frozen_and_moved_and_buffers_replaced(waiting, text, tmp_path):
    def run(t):
        (model,) = t.model_parts
        weight = next(model.parameters())
        for seed in range(12):
            if seed == 4:
                weight.requires_grad_(False)
            if seed == 7:
                weight.data = weight.data.clone()
            if seed == 10:
                model.freqs_cis = model.freqs_cis.conj().resolve_conj()
            yield gradients(t, seed)

    pairs = both_ways(lambda t: [*run(t)], tmp_path, text)
    assert Graph.replays == 6  # Steps 3, 5, 6, 8, 9 and 11.
    for expected, found in pairs:
        assert len(found) == len(expected) and all(map(torch.equal, found, expected))


def test_gradients_of_others_are_added_to(waiting, text, tmp_path):
    def run(t):
        (model,) = t.model_parts
        weight = next(model.parameters())
        for seed in range(6):
            t.optimizers.zero_grad()
            if seed < 5:
                run_batch(t, seed)
            else:
                weight.grad = torch.ones_like(weight)
            run_batch(t, seed + 6)
            yield from (p.grad.clone() for p in model.parameters())

    pairs = both_ways(lambda t: [*run(t)], tmp_path, text)
    assert Graph.replays == 4
    assert all(torch.equal(expected, found) for expected, found in pairs)


def test_only_plain_values_let_a_batch_be_captured():
    labels = torch.zeros(2, 3)
    forms = [
        [ModelTensors().form_of({"input": labels, "extra": extra}, labels, 1) for _ in range(2)]
        for extra in (True, "name", [torch.ones(2)], {})
    ]
    assert [a == b for a, b in forms] == [True, True, False, False]


def test_nothing_is_captured_where_the_cpu_waits(waiting, text, tmp_path, caplog):
    waiting.append("moe.py:7")
    with trainer(parse(tmp_path, toml("llama3", (LINEAR,)), *training(text, tmp_path), *KEY)) as t:
        Graph.model = t.model_parts[0]
        for seed in range(5):
            gradients(t, seed)
    assert not Graph.replays
    records = [r for r in caplog.records if r.levelno == logging.WARNING]
    (warning,) = [r.getMessage() for r in records if "cuda_graph" in r.getMessage()]
    assert warning.startswith(f"titan_fp8: [{LINEAR}] cuda_graph: no step is captured")
    assert warning.endswith("the CPU waits for the GPU at moe.py:7")


def test_looking_for_waits_keeps_the_debug_mode_and_other_warnings(monkeypatch):
    modes = [2]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def wait():
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

    with pytest.warns() as others, step_graph.waits() as places:
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
        with ThreadPoolExecutor() as another_thread:
            another_thread.submit(wait).result()
    assert modes == [2, "warn", 2]
    assert len(places) == 1 and "test_step_graph.py:" in places[0]
    messages = [str(w.message) for w in others]
    assert messages == ["something else", "called a synchronizing CUDA operation"]


def test_a_trainer_may_take_inputs_from_a_batch():
    inputs, labels = {"input": torch.ones(2), "positions": torch.ones(2)}, torch.ones(2)
    batch = Batch(inputs, labels, torch.tensor(4.0))
    batch.arguments()[0].pop("positions")
    batch.copy_({**inputs, "positions": torch.zeros(2)}, labels, torch.tensor(4.0))
    assert torch.equal(batch.arguments()[0]["positions"], torch.zeros(2))


def test_an_error_of_the_capture_names_the_key_and_the_reason(waiting, text, tmp_path, monkeypatch):
    def fail(*args):
        try:
            raise ValueError("the reason")
        finally:
            raise RuntimeError("the end of the capture")

    monkeypatch.setattr(captured_step, "Graph", fail)
    with trainer(parse(tmp_path, toml("llama3", (LINEAR,)), *training(text, tmp_path), *KEY)) as t:
        for seed in range(3):
            gradients(t, seed)
        with pytest.raises(RuntimeError, match=r"cuda_graph = True: .*ValueError: the reason"):
            gradients(t, 3)


def test_every_step_checks_the_exchanges(waiting, text, tmp_path, monkeypatch):
    def fail():
        raise RuntimeError("a rank has died")

    failures = [SimpleNamespace(check=lambda: None)]
    monkeypatch.setattr(gpu_failure, "_failures", failures)
    with trainer(parse(tmp_path, toml("llama3", (LINEAR,)), *training(text, tmp_path), *KEY)) as t:
        Graph.model = t.model_parts[0]
        for seed in range(5):
            gradients(t, seed)
        failures[0].check = fail
        with pytest.raises(RuntimeError, match="a rank has died"):
            gradients(t, 5)


def test_a_checkpoint_comes_after_the_step(monkeypatch):
    calls = []
    stream = SimpleNamespace(synchronize=lambda: calls.append("the step ends"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    save = step_graph.after_step(lambda self, *args: calls.append(args))
    save(None, {}, "step-4")
    assert calls == ["the step ends", ({}, "step-4")]


def test_closing_frees_the_graph(waiting, text, tmp_path):
    made = []
    with pytest.MonkeyPatch.context() as patch:
        init = step_graph.StepGraph.__init__
        patch.setattr(
            step_graph.StepGraph, "__init__", lambda self, *a: made.append(self) or init(self, *a)
        )
        with trainer(
            parse(tmp_path, toml("llama3", (LINEAR,)), *training(text, tmp_path), *KEY)
        ) as t:
            Graph.model = t.model_parts[0]
            for seed in range(4):
                gradients(t, seed)
            assert made[0].captured
            weight = weakref.ref(next(Graph.model.parameters()))
    Graph.model = None
    assert not made[0].captured
    del t
    gc.collect()
    assert weight() is None


def test_a_number_of_tokens_divides_as_on_a_gpu():
    divisor = Divisor(3, torch.device("cpu"))
    divisor.copy_(7)
    loss = torch.tensor(21.0, requires_grad=True)
    result = loss / divisor
    result.backward()
    inverse = torch.tensor(1.0) / torch.tensor(7.0)
    assert result == loss * inverse and loss.grad == inverse


PP = ("--parallelism.pipeline_parallel_degree", 2)


@pytest.mark.parametrize(
    "flags, words",
    [
        (PP, "parallelism.pipeline_parallel_degree must be 1"),
        (EP, None),
        ((*EP, *FP8), None),
        ((*EP, f"--{GROUPED_MM}.permutation", "host"), 'permutation must be "gather"'),
        (("--parallelism.data_parallel_replicate_degree", 2), "data_parallel_shard_degree must"),
        (("--parallelism.enable_async_tensor_parallel",), "async_tensor_parallel must be false"),
        (("--fault_tolerance.enable",), "fault_tolerance.enable must be false"),
        (("--training.enable_cpu_offload",), "training.enable_cpu_offload must be false"),
        (("--optimizer.early_step_in_backward",), "optimizer.early_step_in_backward must be"),
        (("--model.name", "flux"), "model.name must not be flux"),
    ],
)
def test_settings_that_forbid_it(waiting, tmp_path, monkeypatch, flags, words):
    monkeypatch.setattr(ParallelDims, "get_mesh", lambda *args: SimpleNamespace(get_group=object))
    config = job(tmp_path, "deepseek_v3", f"{AC}.mode", "none", *KEY, *flags, converters=BOTH)
    ranks = 2 if EP[0] in flags or PP[0] in flags or "replicate" in str(flags) else 1
    expected = pytest.raises(ValueError) if words else contextlib.nullcontext()
    model = build(job(tmp_path, "deepseek_v3"))
    with expected as caught:
        convert(config, model, ranks)
    if words:
        assert str(caught.value).startswith(f"[{LINEAR}] cuda_graph = True: ")
        assert words in str(caught.value)


@pytest.mark.parametrize("exchange", [(), FP8], ids=["bf16", "fp8"])
def test_gpus_of_experts_must_reach_each_other(waiting, tmp_path, monkeypatch, exchange):
    monkeypatch.setattr(ParallelDims, "get_mesh", lambda *args: SimpleNamespace(get_group=object))
    monkeypatch.setattr(cuda_graph, "reach_each_other", lambda group: False)
    config = job(tmp_path, "deepseek_v3", *KEY, *EP, *exchange)
    with pytest.raises(ValueError, match="cuda_graph = True: .* must reach each other's memory"):
        convert(config, build(config), 2)


@pytest.mark.parametrize("p, preserve", [(0.0, True), (0.1, True), (0.1, False)])
def test_checkpoints_preserve_no_state_of_random_numbers(waiting, tmp_path, caplog, p, preserve):
    caplog.set_level(logging.INFO)
    flags = (f"{AC}.mode", "full", f"{AC}.{'' if preserve else 'no_'}preserve_rng_state")
    config = job(tmp_path, "llama3", *KEY, *flags, converters=(LINEAR,))
    model = build(config)
    model.dropout = torch.nn.Dropout(p)
    if p and preserve:
        with pytest.raises(ValueError, match=r"cuda_graph = True: .*preserve_rng_state must be"):
            convert(config, model)
        return
    convert(config, model)
    assert not config.activation_checkpoint.preserve_rng_state
    assert ("preserve_rng_state is false now" in caplog.text) == preserve


@pytest.mark.parametrize("preserve", [True, False])
def test_a_step_that_draws_random_numbers_is_an_error(waiting, text, tmp_path, preserve):
    flags = (f"{AC}.mode", "full", f"{AC}.{'' if preserve else 'no_'}preserve_rng_state")
    config = parse(tmp_path, toml("llama3", (LINEAR,)), *training(text, tmp_path), *KEY, *flags)
    expected = pytest.raises(ValueError, match="cuda_graph = True: .*preserve_rng_state must be")
    with trainer(config) as t:
        Graph.model = t.model_parts[0]
        dropout = torch.nn.functional.dropout  # No module shows that there is one.
        Graph.model.norm.register_forward_hook(lambda m, x, y: dropout(y))
        with expected if preserve else contextlib.nullcontext():
            gradients(t, 0)


def test_without_a_gpu_it_changes_nothing(tmp_path, caplog):
    config = job(tmp_path, "deepseek_v3", *KEY, *EP)
    model = build(config)
    convert(config, model, 2)
    assert "cuda_graph changes nothing without a CUDA GPU" in caplog.text
    assert config.activation_checkpoint.preserve_rng_state
    assert {x.exchange for x in model.modules() if isinstance(x, GatherMoE)} == {None}


def test_the_baseline_of_a_file_is_stock_torchtitan(waiting, tmp_path, caplog):
    config = job(tmp_path, "llama3", *KEY, f"--{LINEAR}.recipe", "bf16", converters=(LINEAR,))
    convert(config, build(config))
    assert "cuda_graph changes nothing without host_speedups" in caplog.text


def test_the_trainer_that_runs_as_the_program_is_patched(monkeypatch):
    main = ModuleType("__main__")
    main.__spec__ = SimpleNamespace(name="torchtitan.train")
    main.Trainer = type("Trainer", (), {})
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert Target("torchtitan.train:Trainer.close").locate() == (main.Trainer, "close")
