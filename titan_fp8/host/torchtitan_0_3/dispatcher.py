"""The dispatch of tokens to experts and back, by gathers (`titan_fp8/host/permute.py`).

torchtitan 0.3's AllToAllTokenDispatcher does not pad the groups of experts; of those that do, one
needs torchao and the other is for HybridEP's hardware. `GatherTokenDispatcher` is one that pads,
and that sorts by gathers. Without expert parallelism the quantizers pad the groups themselves.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchtitan.config.override import derive
from torchtitan.distributed.spmd_types import maybe_set_sparse_mesh
from torchtitan.models.common.moe import RoutedExperts
from torchtitan.models.common.token_dispatcher import (
    AllToAllDispatchMetadata,
    AllToAllTokenDispatcher,
    LocalDispatchMetadata,
)
from torchtitan.protocols.module import Module

from titan_fp8.host.permute import (
    Combine,
    Expand,
    Permutation,
    rows_of_slots,
    slots_by_expert,
    sort_back,
    sort_by_expert,
)


class GatherTokenDispatcher(AllToAllTokenDispatcher):
    """AllToAllTokenDispatcher by gathers, which pads each expert's tokens under EP.

    In the metadata, `token_indices_experts_sorted_N` holds slots, `topk_scores_experts_sorted_N`
    the scores (T, K) in the order of tokens, and `permuted_indices` a `Permutation`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):
        pad_multiple: int = 1

    def __init__(self, config: Config):
        super().__init__(config)
        self.pad_multiple = config.pad_multiple

    def _local_reorder(
        self, x_TD: Tensor, topk_scores_TK: Tensor, topk_expert_ids_TK: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens (T, D) as rows (N, D) sorted by expert, their slots (N,), and the scores."""
        slots = slots_by_expert(topk_expert_ids_TK, self.num_experts)
        scores = topk_scores_TK.float()
        return Expand.call(x_TD, slots, rows_of_slots(slots, scores), None), slots, scores

    def _permute(
        self, routed_input_RD: Tensor, num_global_tokens_per_local_expert_E: Tensor
    ) -> tuple[Any, ...]:
        """Rows (R, D) from the ranks to rows (P, D) sorted by local expert and padded."""
        assert self.ep_mesh is not None
        counts, ranks = num_global_tokens_per_local_expert_E, self.ep_mesh.size()
        permuted = sort_by_expert(routed_input_RD, counts, ranks, self.pad_multiple)
        return routed_input_RD.shape, *permuted

    def _unpermute(
        self, routed_output_RD: Tensor, input_shape: torch.Size, permuted_indices: Permutation
    ) -> Tensor:
        return sort_back(routed_output_RD, permuted_indices)

    def combine(
        self, routed_output_RD: Tensor, metadata: LocalDispatchMetadata, x_TD: Tensor
    ) -> Tensor:
        """The sum of each token's rows, weighted by the scores: (T, D)."""
        if self.ep_mesh is not None:
            assert isinstance(metadata, AllToAllDispatchMetadata)
            routed_output_RD = self._unpermute(
                routed_output_RD, metadata.input_shape, metadata.permuted_indices
            )
            splits = metadata.input_splits, metadata.output_splits
            with maybe_set_sparse_mesh():
                group = self.ep_mesh.get_group()
                routed_output_RD = self._combine_token_exchange(routed_output_RD, group, *splits)
        slots = metadata.token_indices_experts_sorted_N
        scores = metadata.topk_scores_experts_sorted_N
        return Combine.call(routed_output_RD, slots, rows_of_slots(slots, scores), scores).to(
            x_TD.dtype
        )


def dispatch_by_gathers(model: Module.Config, alignment: int) -> int:
    """Turns the AllToAllTokenDispatchers of a model's config into GatherTokenDispatchers, in place.

    Subclasses, and the dispatchers of other communication backends, are left as they are. Returns
    how many there are now.
    """
    layers = [config for _, config, *_ in model.traverse(RoutedExperts.Config)]
    layers = [x for x in layers if type(x.token_dispatcher) is AllToAllTokenDispatcher.Config]
    for layer in layers:
        layer.token_dispatcher = derive(
            layer.token_dispatcher, GatherTokenDispatcher.Config, pad_multiple=alignment
        )
    return len(layers)
