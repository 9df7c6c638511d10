"""AdamW for bf16 parameters that rounds new weights stochastically.

With lr = 5e-5 a typical update is a tenth of the distance between two neighboring bf16 numbers at
a weight of 0.02. Rounding to nearest loses most such updates; stochastic rounding keeps them in
expectation (arXiv 2010.06192), for models whose FP32 parameters do not fit.
"""

from typing import Any

import torch
from torch import Tensor


def round_stochastically(x: Tensor, seed: Tensor) -> Tensor:
    """Rounds FP32 to one of the two neighboring bf16 numbers, so that the mean is x.

    Args:
        x: FP32, (n,), n < 2^31.
        seed: int32, (2,). The random bits depend on it and on an element's position only.

    Returns:
        bf16, (n,). Inf and NaN stay what they are.
    """
    random = _hash(torch.arange(x.numel(), dtype=torch.int32, device=x.device))
    for word in seed.unbind():
        random = _hash(random ^ word)
    # bf16 is the upper half of FP32. A random lower half carries into it as often as it should.
    bits = (x.view(torch.int32) + (random & 0xFFFF)) & -0x10000
    return torch.where(x.isfinite(), bits.view(torch.float32), x).to(torch.bfloat16)


def _hash(x: Tensor) -> Tensor:
    """The finalizer of MurmurHash3, on int32, whose products wrap around."""
    x = x ^ (x >> 16 & 0xFFFF)
    x = x * -0x7A143595
    x = x ^ (x >> 13 & 0x7FFFF)
    x = x * -0x3D4D51CB
    return x ^ (x >> 16 & 0xFFFF)


@torch.compile(dynamic=True, fullgraph=True)
def _update(p: Tensor, g: Tensor, m: Tensor, v: Tensor, numbers: Tensor, seed: Tensor) -> None:
    """One step of AdamW on flat tensors; `numbers` are those of StochasticAdamW._numbers."""
    lr, beta1, beta2, eps, decay, correction1, correction2 = numbers.unbind()
    g = g.float()
    m_new = beta1 * m.float() + (1 - beta1) * g
    v_new = beta2 * v.float() + (1 - beta2) * g * g
    update = (m_new / correction1) / ((v_new / correction2).sqrt() + eps)
    p.copy_(round_stochastically(p.float() * (1 - lr * decay) - lr * update, seed))
    m.copy_(m_new)
    v.copy_(v_new)


class StochasticAdamW(torch.optim.AdamW):
    """torch.optim.AdamW, except that new weights are rounded to bf16 stochastically.

    The moments are bf16, rounded to nearest, which needs a beta2 of at most 0.99: with 0.999 the
    second moment would hardly change. The random bits depend on `rounding_seed`, which is 0 to 127,
    the step, the number of the parameter and the position in the local shard, so runs repeat.
    """

    def __init__(self, params: Any, rounding_seed: int = 0, **options: Any):
        super().__init__(params, **options)
        self.rounding_seed = rounding_seed

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        first = 0  # the number of a group's first parameter
        for group in self.param_groups:
            numbers = None
            for index, p in enumerate(group["params"]):
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = torch.zeros(())
                    state["exp_avg"] = torch.zeros_like(p)
                    state["exp_avg_sq"] = torch.zeros_like(p)
                state["step"] += 1
                if numbers is None:
                    step, device = int(state["step"]), _local(p).device
                    numbers = self._numbers(group, step, device)
                    seeds = self._seeds(step, first, len(group["params"]), device)
                tensors = (p, p.grad, state["exp_avg"], state["exp_avg_sq"])
                _update(*(_local(x).view(-1) for x in tensors), numbers, seeds[index])
            first += len(group["params"])

    def _numbers(self, group: dict[str, Any], step: int, device: torch.device) -> Tensor:
        beta1, beta2 = group["betas"]
        numbers = [group["lr"], beta1, beta2, group["eps"], group["weight_decay"]]
        numbers += [1 - beta1**step, 1 - beta2**step]
        # The CPU would wait for a copy from memory that is not pinned.
        host = torch.tensor(numbers, dtype=torch.float32, pin_memory=device.type == "cuda")
        return host.to(device, non_blocking=True)

    def _seeds(self, step: int, first: int, count: int, device: torch.device) -> Tensor:
        """Seeds (count, 2) of parameters from the number `first`, int32.

        No other parameter, step (below 2^31) or `rounding_seed` has them.
        """
        numbers = torch.arange(first, first + count, dtype=torch.int32, device=device)
        numbers += self.rounding_seed << 24
        return torch.stack((torch.full_like(numbers, step), numbers), dim=1)


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, torch.distributed.tensor.DTensor) else x
