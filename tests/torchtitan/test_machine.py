"""How a conversion depends on GPU, torch and job: emulation, checkpointing, schedules, alignment.

GPUs are simulated, so that every case is tested on every machine.
"""

import logging
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch._functorch.partitioners
import torch.distributed as dist
from titan import (
    AC,
    BOTH,
    CHECKPOINTING,
    GROUPED_MM,
    LINEAR,
    build,
    convert,
    converted,
    job,
    of_type,
    one_process,
)
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torchtitan.distributed import activation_checkpoint
from torchtitan.tools import utils

import titan_fp8
from titan_fp8.torchtitan_0_2.experts import FP8GroupedExperts

OPS = torch.ops.titan_fp8
GEMMS = (OPS.blockwise_fprop.default, OPS.rowwise_fprop.default)


@pytest.fixture(autouse=True)
def log(caplog, fresh_torchtitan):
    caplog.set_level(logging.INFO)


@pytest.mark.parametrize("gemm", GEMMS)
def test_op_level_checkpointing_takes_dense_fp8_gemms_for_mm(tmp_path, gemm):
    # The last model counts: neither once more, nor as one that is compiled.
    for flag in ("--compile.no_enable", "--compile.enable", "--compile.no_enable"):
        converted(job(tmp_path, "llama3", flag, converters=(LINEAR,)))
    asked = []

    def policy(ctx, func, *args):
        asked.append((func, tuple(args[1].shape)))
        return CheckpointPolicy.PREFER_RECOMPUTE

    module = activation_checkpoint.ptd_checkpoint_wrapper(
        nn.Identity(), context_fn=lambda: create_selective_checkpoint_contexts(policy)
    )
    forward, _ = module.checkpoint_fn.keywords["context_fn"]()
    a, b, s = torch.empty(3, 32), torch.empty(48, 32), torch.empty(3, 1)
    for offs in (None, torch.tensor([3], dtype=torch.int32)):
        forward.policy_fn(None, gemm, a, s, b, offs, False, torch.bfloat16)
    assert asked == [(torch.ops.aten.mm.default, (32, 48)), (gemm, (3, 1))]


def test_gemms_that_compiled_code_runs_are_not_taken_for_mm(tmp_path):
    """Their outputs must not be saved: Inductor reuses their memory."""
    asked = []

    def policy(ctx, func, *args, **kwargs):
        asked.append(func)
        return CheckpointPolicy.PREFER_RECOMPUTE

    def contexts():
        return create_selective_checkpoint_contexts(policy)

    def asked_for(contexts) -> set:
        asked.clear()
        x, w = torch.randn(16, 32), torch.randn(48, 32)
        for context in contexts:  # forward, and what recomputes it
            with context:
                torch.mm(x, w.t())
                OPS.blockwise_fprop(*OPS.quantize_1x128(x), w)
                OPS.invert_index(torch.arange(3), 3)
        return set(asked)

    def adapted(compile_a_part: Callable) -> set:
        converted(job(tmp_path, "llama3", converters=(LINEAR,)))
        block = nn.Sequential(nn.Identity())
        module = activation_checkpoint.ptd_checkpoint_wrapper(block, context_fn=contexts)
        compile_a_part(block)  # when it is wrapped, as torchtitan does
        return asked_for(module.checkpoint_fn.keywords["context_fn"]())

    aten, gemm = torch.ops.aten, OPS.blockwise_fprop.default
    others = {aten.t.default, aten.mm.default, aten.arange.default}
    others |= {OPS.quantize_1x128.default, OPS.invert_index.default}
    assert adapted(lambda block: block.append(torch.compile(block.pop(0)))) == others | {gemm}
    assert adapted(lambda block: block[0].compile()) == others | {gemm}
    assert adapted(lambda block: None) == others  # the GEMM asks as mm
    # Other checkpoints are not affected.
    assert asked_for(contexts()) == others | {gemm}


@pytest.mark.parametrize(
    "flags, recomputes",
    [
        ((f"{AC}.mode", "none"), True),
        ((f"{AC}.mode", "memory_budget"), True),
        (CHECKPOINTING["layer 2"], True),
        (CHECKPOINTING["layer 1"], False),
        ((f"{AC}.mode", "selective", f"{AC}.selective_ac_option", "0"), False),
        (CHECKPOINTING["op"], False),
        (CHECKPOINTING["full"], False),
    ],
)
def test_the_partitioner_is_patched_by_the_kind_of_checkpointing(tmp_path, flags, recomputes):
    converted(job(tmp_path, "deepseek_v3", "--compile.enable", *flags))
    kinds = torch._functorch.partitioners.get_default_op_list()
    assert (OPS.quantize_1x128_128x1_t in kinds.recomputable_ops) == recomputes


@pytest.mark.parametrize(
    "schedule, version, recipe, refused",
    [
        ("ZBVZeroBubble", "2.11.0+cu130", "rowwise", True),
        ("interleavedzerobubble", "2.12.1", "blockwise", True),
        ("InterleavedZeroBubble", "2.13.0", "blockwise", False),
        ("InterleavedZeroBubble", "2.11.0", "bf16", False),
        ("Interleaved1F1B", "2.11.0", "blockwise", False),
    ],
)
def test_a_schedule_that_this_torch_cannot_run_is_refused(
    tmp_path, monkeypatch, schedule, version, recipe, refused
):
    flags = [f"--{LINEAR}.recipe", recipe, "--parallelism.pipeline_parallel_degree", 2]
    flags += ["--parallelism.pipeline_parallel_schedule", schedule]
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    message = re.escape(
        f"parallelism.pipeline_parallel_schedule = {schedule!r}: on torch {version}"
    )
    with pytest.raises(ValueError, match=message) if refused else nullcontext():
        converted(job(tmp_path, "llama3", *flags, converters=(LINEAR,)))


def test_async_tensor_parallelism_is_warned_about_once(tmp_path, caplog):
    flag = "--parallelism.enable_async_tensor_parallel"
    converted(job(tmp_path, "deepseek_v3", flag))
    warnings = [r for r in caplog.records if "async tensor parallel" in r.message]
    assert [r.levelname for r in warnings] == ["WARNING"]


def test_emulation_is_announced_once_a_run(tmp_path, caplog):
    converted(job(tmp_path, "deepseek_v3"))
    assert caplog.text.count("emulated") == 1


@pytest.mark.parametrize("section", BOTH)
@pytest.mark.parametrize(("recipe", "threads"), [("rowwise", False), ("bf16", True)])
def test_backward_runs_in_the_thread_that_calls_it_with_speedups(
    tmp_path, section, recipe, threads
):
    config = job(tmp_path, "deepseek_v3", f"--{section}.recipe", recipe, converters=(section,))
    with torch.autograd.set_multithreading_enabled(True):
        converted(config)
        assert torch._C._is_multithreading_enabled() == threads


@pytest.fixture
def a_gpu(monkeypatch):
    """Makes torch report a GPU of some compute capability."""

    def pretend(capability: tuple[int, int]) -> None:
        device = 10 * capability[0] + capability[1]  # asked for once a device and process
        monkeypatch.setattr(utils, "device_type", "cuda")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: device)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Some GPU")
        monkeypatch.setattr(torch.cuda, "current_stream", object)
        monkeypatch.setattr(torch.cuda, "Stream", object)

    return pretend


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0)])
@pytest.mark.parametrize("section", BOTH)
def test_a_gpu_that_cannot_run_the_recipe_is_refused(tmp_path, a_gpu, capability, section):
    config = job(tmp_path, "deepseek_v3", converters=(section,))
    model = build(config)
    a_gpu(capability)
    with pytest.raises((RuntimeError, ValueError)) as caught:
        convert(config, model)
    message = str(caught.value)
    assert all(word in message for word in ("Some GPU", "Hopper", "emulate = true"))
    assert "{}.{}".format(*capability) in message
    assert not of_type(model, titan_fp8.FP8Linear) and not of_type(model, FP8GroupedExperts)


def test_a_gpu_that_cannot_run_the_recipe_may_emulate_it(tmp_path, a_gpu, caplog):
    config = job(tmp_path, "deepseek_v3", f"--{LINEAR}.emulate", f"--{GROUPED_MM}.emulate")
    model = build(config)
    a_gpu((8, 0))
    convert(config, model)
    fp8 = [*of_type(model, titan_fp8.FP8Linear).values()]
    fp8 += of_type(model, FP8GroupedExperts).values()
    assert all(module.emulate for module in fp8)
    assert caplog.text.count("emulated") == 1


def test_a_gpu_that_cannot_run_fp8_runs_the_bf16_baseline(tmp_path, a_gpu):
    config = job(tmp_path, "deepseek_v3", f"--{LINEAR}.recipe", "bf16")
    model = build(config)
    a_gpu((8, 0))
    convert(config, model)


def test_hopper_does_not_emulate(tmp_path, a_gpu, caplog):
    config = job(tmp_path, "deepseek_v3")
    model = build(config)
    a_gpu((9, 0))
    convert(config, model)
    assert of_type(model, FP8GroupedExperts) and "emulated" not in caplog.text


class Aligned(TorchDispatchMode):
    """Records the `aligned` of each FP8 op that is given groups."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        names = [argument.name for argument in func._schema.arguments]
        if func.namespace == "titan_fp8" and "aligned" in names[: len(args)]:
            self.seen.add(args[names.index("aligned")])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "recipe, backend, aligned",
    [
        ("blockwise", "standard", True),
        ("rowwise", "standard", False),
        ("blockwise", "deepep", False),
    ],
)
def test_groups_count_as_aligned_only_under_torchtitans_dispatch(
    tmp_path, monkeypatch, recipe, backend, aligned
):
    """And only for multiples of 128, not for rowwise's 16."""
    # DeepEP itself needs its package and a GPU; its MoE class is torchtitan's.
    stub = SimpleNamespace(sync_combine=lambda: None)
    monkeypatch.setitem(sys.modules, "torchtitan.distributed.deepep", stub)
    flags = ("--parallelism.expert_parallel_comm_backend", backend)
    flags += ("--quantize.linear.titan_fp8.recipe", recipe)
    model = converted(job(tmp_path, "deepseek_v3", *flags, flavor="tiny"))
    experts = model.layers["1"].moe.experts.to_empty(device="cpu")
    for weight in experts.parameters():
        nn.init.normal_(weight, std=0.1)
    sizes = torch.tensor([128, 0, 256, 128]) if aligned else torch.tensor([5, 0, 130, 17])
    x = torch.randn(int(sizes.sum()) + 8, 128, requires_grad=True)
    plain = experts(x, sizes)

    with one_process():
        mesh = dist.init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
        for name, weight in [*experts.named_parameters()]:
            experts.register_parameter(
                name, nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)]))
            )
        with Aligned() as mode:
            y = experts(x, sizes)
            y.sum().backward()
        assert mode.seen == {aligned}
        torch.testing.assert_close(y, plain, rtol=0, atol=0)
