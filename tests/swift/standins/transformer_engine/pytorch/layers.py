"""The layers, with Transformer Engine's parameters and names of weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional


def _empty(*shape: int, params_dtype: Any, device: Any) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=params_dtype or torch.float32, device=_real(device)))


def _real(device: Any) -> Any:
    return device if str(device) == "meta" else "cpu"


class _Base(nn.Module):
    """A linear layer. Its extra state is empty, as that of Transformer Engine without 8-bit types."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        return_bias: bool = False,
        tp_size: int = 1,
        parallel_mode: str | None = None,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        params_dtype: torch.dtype | None = None,
        device: Any = "cpu",
        fuse_wgrad_accumulation: bool = False,
    ) -> None:
        super().__init__()
        if tp_size != 1 or fuse_wgrad_accumulation:
            raise NotImplementedError("the stand-in for Transformer Engine has no tensor parallelism and no fusion")
        self.in_features, self.out_features = in_features, out_features
        self.use_bias, self.return_bias, self.tp_size, self.tp_rank = bias, return_bias, tp_size, 0
        self.parallel_mode = parallel_mode
        self.fp8 = self.fp8_calibration = False
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False, "recipe": None}
        self._init = init_method or (lambda weight: nn.init.normal_(weight, std=0.023))
        self._tracker, self._tracker_name = get_rng_state_tracker, rng_tracker_name
        self._made = {"params_dtype": params_dtype, "device": device}

    def _weight(self) -> nn.Parameter:
        weight = _empty(self.out_features, self.in_features, **self._made)
        if weight.device.type != "meta":
            names = {} if self._tracker_name is None else {"name": self._tracker_name}
            with torch.no_grad(), nullcontext() if self._tracker is None else self._tracker().fork(**names):
                self._init(weight)
        return weight

    def _bias(self) -> nn.Parameter:
        bias = _empty(self.out_features, **self._made)
        with torch.no_grad():
            bias.zero_()
        return bias

    def init_fp8_metadata(self, num_gemms: int = 1) -> None: ...

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None: ...

    def _result(self, out: torch.Tensor, bias: torch.Tensor | None) -> Any:
        return (out, bias) if self.return_bias else out


class Linear(_Base):
    def __init__(self, in_features: int, out_features: int, *, bias: bool = True, **kwargs: Any) -> None:
        super().__init__(in_features, out_features, bias=bias, **_known(kwargs))
        self.weight = self._weight()
        if bias:
            self.bias = self._bias()

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        bias = self.bias if self.use_bias else None
        return self._result(functional.linear(inp, self.weight, None if self.return_bias else bias), bias)


class LayerNormLinear(_Base):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        eps: float = 1e-5,
        bias: bool = True,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(in_features, out_features, bias=bias, **_known(kwargs))
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        self.return_layernorm_output = return_layernorm_output
        self.layer_norm_weight = _gamma(in_features, zero_centered_gamma, **self._made)
        if normalization != "RMSNorm":
            self.layer_norm_bias = _empty(in_features, **self._made)
            with torch.no_grad():
                self.layer_norm_bias.zero_()
        self.weight = self._weight()
        if bias:
            self.bias = self._bias()

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        normed = _normalise(
            inp,
            self.layer_norm_weight,
            getattr(self, "layer_norm_bias", None),
            eps=self.eps,
            zero_centered=self.zero_centered_gamma,
        )
        bias = self.bias if self.use_bias else None
        out = functional.linear(normed, self.weight, None if self.return_bias else bias)
        parts = (out, *((bias,) if self.return_bias else ()), *((normed,) if self.return_layernorm_output else ()))
        return out if len(parts) == 1 else parts


class GroupedLinear(_Base):
    def __init__(
        self, num_gemms: int, in_features: int, out_features: int, *, bias: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(in_features, out_features, bias=bias, **_known(kwargs))
        self.num_gemms = num_gemms
        for index in range(num_gemms):
            setattr(self, f"weight{index}", self._weight())
            if bias:
                setattr(self, f"bias{index}", self._bias())

    def forward(self, inp: torch.Tensor, m_splits: Sequence[int], is_first_microbatch: bool | None = None) -> Any:
        rows = [int(size) for size in m_splits]
        parts = inp.reshape(-1, self.in_features).split(rows)
        biases = [getattr(self, f"bias{index}") if self.use_bias else None for index in range(self.num_gemms)]
        outs = [
            functional.linear(part, getattr(self, f"weight{index}"), None if self.return_bias else biases[index])
            for index, part in enumerate(parts)
        ]
        return self._result(torch.cat(outs), biases)


def _known(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Leaves out what concerns tensor parallelism, of which there is none."""
    ignored = ("sequence_parallel", "tp_group", "ub_name", "ub_overlap_ag", "ub_overlap_rs", "ub_bulk_dgrad")
    return {name: value for name, value in kwargs.items() if name not in ignored}


def _gamma(size: int, zero_centered: bool, **made: Any) -> nn.Parameter:
    gamma = _empty(size, **made)
    with torch.no_grad():
        gamma.fill_(0.0 if zero_centered else 1.0)
    return gamma


def _normalise(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, eps: float, zero_centered: bool
) -> torch.Tensor:
    wide, gamma = x.float(), weight.float() + (1.0 if zero_centered else 0.0)
    if bias is not None:
        return functional.layer_norm(wide, wide.shape[-1:], gamma, bias.float(), eps).to(x.dtype)
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * gamma).to(x.dtype)


class RMSNorm(nn.Module):
    def __init__(
        self,
        normalized_shape: int = 0,
        eps: float = 1e-5,
        *,
        hidden_size: int = 0,
        sequence_parallel: bool = False,
        zero_centered_gamma: bool = False,
        params_dtype: torch.dtype | None = None,
        device: Any = "cpu",
    ) -> None:
        super().__init__()
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.weight = _gamma(
            normalized_shape or hidden_size, zero_centered_gamma, params_dtype=params_dtype, device=device
        )
        self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None: ...

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = getattr(self, "bias", None)
        return _normalise(x, self.weight, bias, eps=self.eps, zero_centered=self.zero_centered_gamma)


class LayerNorm(RMSNorm):
    def __init__(self, normalized_shape: int = 0, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(normalized_shape, eps, **kwargs)
        self.bias = nn.Parameter(torch.zeros_like(self.weight))


class DotProductAttention(nn.Module):
    """Causal attention over ``[sequence, batch, heads, channels]``, in plain torch."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        *,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        attn_mask_type: str = "causal",
        softmax_scale: float | None = None,
        tp_size: int = 1,
        window_size: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        if tp_size != 1 or window_size is not None or "cp_group" in kwargs or attention_dropout:
            raise NotImplementedError("the stand-in for Transformer Engine has plain causal attention alone")
        channels = kv_channels if isinstance(kv_channels, int) else kv_channels[0]
        self.heads, self.groups = num_attention_heads, num_gqa_groups or num_attention_heads
        self.scale = softmax_scale if softmax_scale is not None else 1 / math.sqrt(channels)

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None: ...

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        attn_mask_type: str = "causal",
        qkv_format: str = "sbhd",
        core_attention_bias: torch.Tensor | None = None,
        **packed: Any,
    ) -> torch.Tensor:
        if qkv_format != "sbhd" or core_attention_bias is not None:
            raise NotImplementedError("the stand-in has no packed sequences: use --padding_free false")
        repeat = query.shape[2] // key.shape[2]
        # [batch, heads, sequence, channels]
        q, k, v = (x.permute(1, 2, 0, 3).float() for x in (query, key, value))
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        scores = q @ k.transpose(-1, -2) * self.scale
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1 + k.shape[2] - q.shape[2])
        if attention_mask is not None:
            hidden = hidden | attention_mask
        out = scores.masked_fill(hidden, -1e9).softmax(-1) @ v
        return out.permute(2, 0, 1, 3).reshape(q.shape[2], q.shape[0], -1).to(query.dtype)
