"""What FSDP2 gathers of a rowwise weight: rows and columns, or in forward the rows alone."""

from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState, is_bw
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup


class ColumnsBuffer:
    """Hides the buffer for the columns of a rowwise weight from FSDP2 in the gathers for forward.

    Autograd saves the weight in forward, and with it the buffers for rows and for columns. FSDP2
    gathers into the buffers in `FSDPParam.all_gather_outputs`, and later resizes them to no bytes.
    Forward reads rows only. So the columns' buffer may stay empty until backward's gather fills it.

    The buffer is hidden only if FSDP2 frees the weight after forward, because only then it gathers
    the weight again for backward. FSDP2 keeps the weight after a forward that is recomputed in
    backward, and may keep it if a unit has several modules and only some of them run. It also keeps
    a weight that is prefetched once more after the unit's forward, as torchtitan's multi-token
    prediction does, if no other forward of the unit follows. So in training, the gathers after a
    unit's first forward, which may be one of an evaluation, move both layouts until the end of a
    backward of the model.
    """

    def __init__(self, unit: FSDPParamGroup, param: FSDPParam):
        self._unit, self._param = unit, param
        self._hidden: list[Tensor] = []

    def layouts_to_gather(self, layouts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The layouts to gather now. If columns are left out, hides their buffer."""
        unit, param = self._unit, self._param
        self.restore()
        # FSDP2 makes the buffers at the first gather, which therefore moves both layouts.
        if len(layouts) != 2 or not param.all_gather_outputs:
            return layouts
        in_forward = unit._training_state == TrainingState.FORWARD and not is_bw()
        frees = unit._reshard_after_forward and len(unit.modules) == 1
        has_run = bool(unit._post_forward_indices) and unit.modules[0].training
        if in_forward and frees and not has_run:
            self._hidden = [param.all_gather_outputs.pop()]
            return layouts[:1]
        return layouts

    def restore(self) -> None:
        """Shows the buffer to FSDP2 again, after a gather."""
        self._param.all_gather_outputs += self._hidden
        self._hidden = []
