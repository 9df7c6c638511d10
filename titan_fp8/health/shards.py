"""Samples of weights that FSDP2 gathers in FP8 (`titan_fp8/fsdp.py`), from this rank's shard.

Their GEMMs read what the shards were quantized to after the last step of the optimizer, and no rank
has the gathered weight in high precision.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from titan_fp8.fsdp.sharded_weight import ShardGather
from titan_fp8.health.sampling import Sample, Sampler
from titan_fp8.layouts import BLOCK


def samples_of_shard(
    sampler: Sampler, gather: ShardGather
) -> Iterator[tuple[tuple[str, ...], Sample]]:
    """The GEMMs that read a layout of a shard, and a sample of it; nothing if it is not fresh."""
    shard, w = gather.shard, gather.values  # (N, K) or (E, N, K).
    if shard is None or not gather.fresh or not w.numel():
        return
    gather.layouts(shard)  # Has been released, if it has been gathered.
    assert shard.q is not None
    spec = shard.spec
    dims = w.shape if w.dim() == 3 else (1, *w.shape)
    expert, row = sampler.sampled_rows_of_experts(dims[0], dims[1], w.device)
    whole_row = row + spec.first_row

    def take(q: Tensor, s: Tensor, of_samples: Callable[[Tensor], Tensor]) -> Sample:
        """Samples q. `of_samples` takes the scales of the sampled rows from s (experts, ...)."""
        s = spec.part(s, len(w)) if w.dim() == 3 else s[None]
        # FSDP2 pads q behind the last row.
        x, bytes_of_q = (t if t.dim() == 3 else t[None] for t in (w, q.view(torch.uint8)))
        x = x[expert, row].to(spec.dtype)
        return sampler.add(q, x, bytes_of_q[expert, row], of_samples(s), s)

    if shard.blockwise:  # A scale for each 128x128 block.
        sample = take(shard.q, shard.s, lambda s: s[expert, whole_row // BLOCK])
        yield ("fprop", "dgrad"), sample
    else:  # One for each row in fprop, and for each column in dgrad.
        assert shard.q_columns is not None
        yield ("fprop",), take(shard.q, shard.s, lambda s: s[expert, whole_row][:, None])
        yield ("dgrad",), take(shard.q_columns, shard.s_t, lambda s: s[expert])
