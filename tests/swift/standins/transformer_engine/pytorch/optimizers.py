"""The optimizers. As in Transformer Engine, Adam counts its steps for each group of parameters, not for each one."""

from __future__ import annotations

from typing import Any

import torch

FusedSGD = torch.optim.SGD


class FusedAdam(torch.optim.Optimizer):
    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        if capturable:
            raise NotImplementedError("the stand-in for Transformer Engine is for no CUDA graph")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = step = group.get("step", 0) + 1
            (beta1, beta2), decay = group["betas"], group["weight_decay"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state, grad = self.state[param], param.grad
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
                if self.adam_w_mode:
                    param.mul_(1 - group["lr"] * decay)
                else:
                    grad = grad + decay * param
                state["exp_avg"].lerp_(grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                spread = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt_().add_(group["eps"])
                param.addcdiv_(state["exp_avg"], spread, value=-group["lr"] / (1 - beta1**step))
