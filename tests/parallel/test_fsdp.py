"""FP8 modules under FSDP2: which gradients are reduced in bf16, and loading into its modules."""

from pathlib import Path

import gloo
import pytest
import torch
from titan import (
    CONVERTERS,
    LINEAR,
    build,
    convert,
    job,
    loss_and_gradients,
    one_process,
    parse,
    toml,
    trainer,
    training,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from titan_fp8 import convert_linears

pytestmark = pytest.mark.usefixtures("fresh_torchtitan")


def test_a_checkpoint_loads_into_fsdp2_shards_of_any_size():
    with one_process("fake", ranks=8):
        model = nn.Sequential(nn.Linear(64, 32))
        convert_linears(model)
        fully_shard(model, mesh=init_device_mesh("cpu", (8,)))
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
        assert model[0].weight.to_local().shape == (4, 64)


FSDP = ("--parallelism.data_parallel_shard_degree", 2)


@pytest.mark.parametrize(
    "flags, replaced",
    [
        (FSDP, True),
        ((*FSDP, f"--{LINEAR}.recipe", "bf16"), False),
        ((*FSDP, f"--{LINEAR}.recipe", "bf16", f"--{LINEAR}.host_speedups", "True"), True),
        ((*FSDP, f"--{LINEAR}.host_speedups", "False"), False),
        (("--parallelism.data_parallel_replicate_degree", 2), False),
    ],
)
def test_reductions_are_replaced_where_the_key_says_so_under_fsdp(tmp_path, flags, replaced):
    original = _fsdp_param_group.foreach_reduce
    config = job(tmp_path, "llama3", *flags, converters=CONVERTERS["llama3"])
    convert(config, build(config), ranks=2)
    assert (_fsdp_param_group.foreach_reduce is not original) == replaced


def train_both_ways(rank: int, folder: Path, text: Path) -> None:
    """On one of two ranks, in bf16."""
    folder = folder / str(rank)
    folder.mkdir()
    flags = (*training(text, folder), *FSDP, f"--{LINEAR}.recipe", "bf16")
    results = []
    for speedups in ("False", "True"):
        own = (*flags, f"--{LINEAR}.host_speedups", speedups)
        with trainer(parse(folder, toml("llama3", CONVERTERS["llama3"]), *own)) as t:
            results.append(loss_and_gradients(t))
    want, got = results
    assert want.keys() == got.keys()
    assert not [name for name in want if not torch.equal(want[name], got[name])]


def test_a_dense_bf16_job_computes_the_same_with_the_key(tmp_path, text):
    gloo.spawn(train_both_ways, 2, tmp_path, text)
