"""Norm kernels of the packages apex and Liger, which ``--fused-kernels`` chooses.

A package is imported only when a run on a GPU may use it. A package that the user names and that cannot be imported is
an error; ``auto`` then uses torch's norms.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from megatron_sp.errors import ConfigError
from megatron_sp.model.child_trials import Outcome, try_in_children
from megatron_sp.model.kernel_trial import disagreement
from megatron_sp.parallel.collectives import gather_objects

#: (x [..., h], weight [h], epsilon) -> [..., h]
RMSNorm = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
#: (x [..., h], weight [h], bias [h], epsilon) -> [..., h]
LayerNorm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]

#: Package -> the module that holds its functions, and the name to install it by.
PACKAGES = {"apex": ("apex.normalization.fused_layer_norm", "apex (from source: github.com/NVIDIA/apex)"),
            "liger": ("liger_kernel.ops", "liger-kernel")}
#: The function that a child calls for each package.
TRIAL = "megatron_sp.model.norm_kernels:try_norms"
#: See ``child_trials.try_in_children``.
Attempt = Callable[[str, Sequence[str], Mapping[str, Any]], dict[str, Outcome]]


@dataclass(frozen=True)
class NormKernels:
    """The functions that ``Norm`` computes with. None stands for torch's own.

    Args:
        warnings: sentences for the log on packages that are installed and cannot be used here.
    """

    name: str = "torch"
    rms_norm: RMSNorm | None = None
    layer_norm: LayerNorm | None = None
    warnings: tuple[str, ...] = ()


def choose_norm_kernels(choice: str, device: torch.device, attempt: Attempt = try_in_children) -> NormKernels:
    """Return the kernels that ``--fused-kernels`` names.

    "auto" on a GPU means the first package that can be imported and gives the same results as torch. If there is none,
    and on other devices, it means torch. Packages are tried in child processes, and all ranks call this together.

    Raises:
        ConfigError: the flag names a package, and the device is not a GPU or the package cannot be imported.
    """
    if choice == "auto" and device.type == "cuda":
        return _first_that_agrees(device, attempt)
    if choice in ("auto", "torch"):
        return NormKernels()
    flag = f"--fused-kernels {choice}"
    require_gpu(flag, device)
    return _apex(flag) if choice == "apex" else _liger(flag)


def require_gpu(flag: str, device: torch.device) -> None:
    """Refuse a flag that works on GPUs only.

    Raises:
        ConfigError: the device is not a GPU.
    """
    if device.type != "cuda":
        raise ConfigError(f"{flag} needs a GPU, and this run is on the {device.type}. Leave the flag out")


def _apex(flag: str) -> NormKernels:
    functions = _require_package(flag, "apex")

    def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        return functions.fused_rms_norm_affine(x, weight, weight.shape, epsilon)

    def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, epsilon: float) -> torch.Tensor:
        return functions.fused_layer_norm_affine(x, weight, bias, weight.shape, epsilon)

    return NormKernels("apex", rms_norm, layer_norm)


def _liger(flag: str) -> NormKernels:
    _require_package(flag, "liger")
    rms = importlib.import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction
    layer = importlib.import_module("liger_kernel.ops.layer_norm").LigerLayerNormFunction

    def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        offset, casting, in_place = 0.0, "llama", False
        return rms.apply(x, weight, epsilon, offset, casting, in_place)

    return NormKernels("liger", rms_norm, layer.apply)


def _require_package(flag: str, package: str) -> Any:
    module, pip_name = PACKAGES[package]
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:
        raise ConfigError(f"{flag} needs the package {pip_name}, which cannot be imported here ({error}). Install it, "
                          "or leave the flag out to use torch's own kernels") from None


def _first_that_agrees(device: torch.device, attempt: Attempt) -> NormKernels:
    """Return the first package that is installed and passes its trial on all ranks, else torch's norms.

    All ranks exchange what they found, also those on machines where no package is installed.
    """
    names = [name for name in PACKAGES if _may_be_installed(name)]
    every_rank = gather_objects(attempt(TRIAL, names, {"device": str(device)}) if names else {})
    warnings: list[str] = []
    for name in PACKAGES:
        outcomes = [rank.get(name, Outcome(False, missing=True)) for rank in every_rank]
        if all(outcome.missing for outcome in outcomes):
            continue
        if all(outcome.passed for outcome in outcomes):
            return replace(choose_norm_kernels(name, device), warnings=tuple(warnings))
        why = next((outcome.why for outcome in outcomes if outcome.why), "is not installed on all machines")
        warnings.append(f"the norm kernel of {name} {why}. It is not used.")
    return NormKernels(warnings=tuple(warnings))


def _may_be_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(PACKAGES[package][0].partition(".")[0]) is not None
    except ValueError:  # a module that was imported without a specification
        return True


def try_norms(package: str, *, device: str) -> Outcome:
    """Compare the norms of a package with torch's. Runs in a child process."""
    place = torch.device(device)
    if place.type == "cuda":
        torch.cuda.set_device(place)  # a Triton kernel runs on the current GPU, wherever its tensors are
    try:
        kernels = choose_norm_kernels(package, place)
    except ConfigError:
        return Outcome(False, missing=True)
    why = _disagreement_with_torch(kernels, place)
    return Outcome(not why, why)


def _disagreement_with_torch(kernels: NormKernels, device: torch.device) -> str:
    """Return what is wrong with the norms, in words that follow their name; "" if nothing is."""
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator).to(device, torch.bfloat16).requires_grad_()
                       for shape in ((16, 64), (64,), (64,)))
    pairs: list[tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]] = []
    if (rms := kernels.rms_norm) is not None:
        pairs.append((lambda: rms(x, weight, 1e-5), lambda: F.rms_norm(x, (64,), weight, 1e-5)))
    if (layer := kernels.layer_norm) is not None:
        pairs.append((lambda: layer(x, weight, bias, 1e-5), lambda: F.layer_norm(x, (64,), weight, bias, 1e-5)))
    return next((why for kernel, reference in pairs if (why := disagreement(kernel, reference, (x, weight)))), "")
