"""What FSDP2 does with an FP8 module, and the one function of FSDP2 that titan_fp8 replaces.

To FSDP2 an FP8 module is an ordinary one. Its parameters are high-precision tensors under their own
names, and `fully_shard` treats them as it treats nn.Linear's:

- forward: FSDP2 all-gathers the parameters in `mixed_precision_param`, bf16 by default. The module
  quantises the gathered weight inside fprop; no FP8 copy of it outlives the product. FSDP2 then
  frees the gathered weight, if `fsdp_reshard_after_forward` says so.
- backward: FSDP2 gathers again, and dgrad quantises the weight as gathered then.
- gradients: wgrad returns the dtype of the gathered weight, and FSDP2 reduce-scatters it in
  `mixed_precision_reduce`, FP32 by default.

With `fsdp_all_gather = true` each rank quantises its shard, and the weights of converted layers are
gathered in FP8, through FSDP2's own extension (`titan_fp8/fsdp.py`). Gradients, the optimizer and
checkpoints do not change.

Shards of FSDP2 may be of any size. Shards of tensor parallelism are multiplied as they are and are
checked when they are registered (`check_shards`).

`copies_for_one_rank` replaces a copy of FSDP2's that is slow for groups of one rank. With expert
parallelism over all ranks, each rank is alone in the group over which the gradients of its experts
are reduced. As for any group, FSDP2 concatenates the gradients in the reduction's dtype by
`chunk_cat`, which builds a table of all chunks on the CPU and copies it to the GPU. This took 100
ms of CPU time per step for DeepSeekV3-16B on two GPUs. For one rank, plain copies do the same.
"""

import functools
from collections.abc import Callable

from torch import Tensor


def copies_for_one_rank(copy_in: Callable) -> Callable:
    """Wraps FSDP2's `foreach_reduce_scatter_copy_in`: plain copies in groups of one rank."""

    @functools.wraps(copy_in)
    def copy_in_or_copy(
        unsharded_grads: list[Tensor], reduce_scatter_input: Tensor, world_size: int
    ) -> None:
        if world_size > 1:
            return copy_in(unsharded_grads, reduce_scatter_input, world_size)
        slots = reduce_scatter_input.split([grad.numel() for grad in unsharded_grads])
        for slot, grad in zip(slots, unsharded_grads):
            slot.view_as(grad).copy_(grad)

    return copy_in_or_copy
