"""Compare a kernel of another package with torch before a run uses it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_sp.model.child_trials import error_in_words


def same_results(kernel: Callable[[], torch.Tensor], reference: Callable[[], torch.Tensor],
                 inputs: tuple[torch.Tensor, ...]) -> bool:
    """Return whether two computations agree, see ``disagreement``."""
    return not disagreement(kernel, reference, inputs)


def disagreement(kernel: Callable[[], torch.Tensor], reference: Callable[[], torch.Tensor],
                 inputs: tuple[torch.Tensor, ...]) -> str:
    """Compare two computations in half precision, in their results and in the gradients of ``inputs``.

    Another version of a package may give a function's arguments another meaning. A kernel that raises anything does not
    pass.

    Returns:
        "" if they agree, else what is wrong, as the end of a sentence that begins with the name of the kernel
    """
    try:
        found: list[torch.Tensor] = []
        wanted: list[torch.Tensor] = []
        for compute, results in ((kernel, found), (reference, wanted)):
            result = compute()
            results += [result.detach(), *torch.autograd.grad(result.float().square().sum(), inputs)]
        agree = all(torch.allclose(x.float(), y.float(), rtol=0.05, atol=0.05 * float(y.abs().max()))
                    for x, y in zip(found, wanted, strict=True))
    except Exception as error:  # noqa: BLE001 (whatever another package raises, its kernel is not used)
        return error_in_words(error)
    return "" if agree else "gives wrong results"
