"""Kernels of other packages, looked up at start and imported only when asked for by name.

Nothing here is needed to train, and nothing compiles when it is imported. What cannot be imported
although it was named is a mistake of the user's; what torch has itself is the default.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn import attention

from megatron_sp.errors import ConfigError

#: (x [..., h], weight [h], epsilon) -> [..., h]
RMSNorm = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
#: (x [..., h], weight [h], bias [h], epsilon) -> [..., h]
LayerNorm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
#: (q [b, s, n, d], k, v [b, s, g, d], causal) -> o [b, s, n, d]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], torch.Tensor]

#: Module that shows a package's presence, and the name under which pip knows it.
PACKAGES = {"apex": ("apex.normalization.fused_layer_norm", "apex (from source: github.com/NVIDIA/apex)"),
            "liger": ("liger_kernel.ops", "liger-kernel"),
            "flash": ("flash_attn", "flash-attn")}


@dataclass(frozen=True)
class NormKernels:
    """What ``Norm`` computes with; None: torch's own."""

    name: str = "torch"
    rms_norm: RMSNorm | None = None
    layer_norm: LayerNorm | None = None


def norm_kernels(choice: str, device: torch.device) -> NormKernels:
    """The kernels of ``--fused-kernels``; auto is torch, whose norms are fused on a GPU.

    Raises:
        ConfigError: named, but there is no GPU or no such package.
    """
    if choice in ("auto", "torch"):
        return NormKernels()
    flag = f"--fused-kernels {choice}"
    _require_gpu(flag, device)
    if choice == "apex":
        functions = _require(flag, "apex")

        def apex_rms(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
            return functions.fused_rms_norm_affine(x, weight, weight.shape, epsilon)

        def apex_layer(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, epsilon: float) -> torch.Tensor:
            return functions.fused_layer_norm_affine(x, weight, bias, weight.shape, epsilon)

        return NormKernels("apex", apex_rms, apex_layer)
    _require(flag, "liger")
    rms = importlib.import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction
    layer = importlib.import_module("liger_kernel.ops.layer_norm").LigerLayerNormFunction

    def liger_rms(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        return rms.apply(x, weight, epsilon, 0.0, "llama", False)  # offset, casting, not in place

    return NormKernels("liger", liger_rms, layer.apply)


def flash_attention(device: torch.device) -> tuple[str, Attend]:
    """The newest flash attention found: 4 or 3 through torch's registry, package flash-attn 2, torch's own.

    Raises:
        ConfigError: no GPU.
    """
    _require_gpu("--attention-core flash", device)
    list_versions = getattr(attention, "list_flash_attention_impls", list)  # torch 2.11 has no registry
    for version in sorted(list_versions(), reverse=True):
        try:
            attention.activate_flash_attention_impl(version)
        except (ImportError, RuntimeError, ValueError, OSError):
            continue  # its package is not there, or not for this GPU
        return f"flash attention {version[2:]} (through torch)", torch_flash
    try:
        function = importlib.import_module(PACKAGES["flash"][0]).flash_attn_func
    except (ImportError, AttributeError, OSError):
        return "torch's flash attention", torch_flash
    return "flash attention 2 (flash-attn)", lambda q, k, v, causal: function(q, k, v, causal=causal)


def torch_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """torch's attention with all kernels but flash switched off: what it cannot do is an error, not slow."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [b, s, n, d] -> [b, n, s, d]
    with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
        o = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
    return o.transpose(1, 2)


def _require(flag: str, package: str) -> Any:
    module, pip_name = PACKAGES[package]
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:
        raise ConfigError(f"{flag} needs the package {pip_name}, which cannot be imported here ({error}); install it, "
                          "or leave the flag out to use torch's own kernels") from None


def _require_gpu(flag: str, device: torch.device) -> None:
    if device.type != "cuda":
        raise ConfigError(f"{flag} needs a GPU and this run is on the {device.type}; leave the flag out")
