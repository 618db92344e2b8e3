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

#: What is left where no other flash attention is found.
TORCH_FLASH = "torch's flash attention"
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
    """The kernels of ``--fused-kernels``; auto: on a GPU the first package that is there and agrees with torch.

    Raises:
        ConfigError: named, but there is no GPU or no such package.
    """
    if choice == "auto" and device.type == "cuda":
        return _found_norms(device)
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


def _found_norms(device: torch.device) -> NormKernels:
    for name in ("apex", "liger"):
        try:
            kernels = norm_kernels(name, device)
        except ConfigError:
            continue
        if norms_agree(kernels, device):
            return kernels
    return NormKernels()


def norms_agree(kernels: NormKernels, device: torch.device) -> bool:
    """Whether norms, and their gradients, are torch's on a small example: another package's interface may change."""
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator).to(device, torch.bfloat16).requires_grad_()
                       for shape in ((16, 64), (64,), (64,)))
    pairs: list[tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]] = []
    if (rms := kernels.rms_norm) is not None:
        pairs.append((lambda: rms(x, weight, 1e-5), lambda: F.rms_norm(x, (64,), weight, 1e-5)))
    if (layer := kernels.layer_norm) is not None:
        pairs.append((lambda: layer(x, weight, bias, 1e-5), lambda: F.layer_norm(x, (64,), weight, bias, 1e-5)))
    return all(agree(found, wanted, (x, weight)) for found, wanted in pairs)


def agree(found: Callable[[], torch.Tensor], wanted: Callable[[], torch.Tensor],
          inputs: tuple[torch.Tensor, ...]) -> bool:
    """Whether two ways to compute give the same in half precision, forward and backward; a failure is a no."""
    try:
        results = []
        for compute in (found, wanted):
            result = compute()
            results.append([result.detach(), *torch.autograd.grad(result.float().square().sum(), inputs)])
        return all(torch.allclose(x.float(), y.float(), rtol=0.05, atol=0.05 * float(y.abs().max()))
                   for x, y in zip(*results))
    except Exception:  # noqa: BLE001 (whatever another package raises, it is not used)
        return False


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
        return TORCH_FLASH, torch_flash
    return "flash attention 2 (flash-attn)", lambda q, k, v, causal: function(q, k, v, causal=causal)


def forget_flash_attention() -> None:
    """Undo what ``flash_attention`` activated in torch's registry."""
    restore = getattr(attention, "restore_flash_attention_impl", None)
    if restore is not None:
        restore()


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
