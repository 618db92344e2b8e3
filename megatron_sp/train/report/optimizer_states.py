"""Norms of the weights and of Adam's moments over the whole model (``--log-optimizer-states-to-tensorboard``).

Instability of a training shows early in the second moments (Li et al., arXiv 2108.06084). The numbers have the names
that Megatron-DeepSpeed gives them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from megatron_sp.parallel.mesh import ParallelMesh
from megatron_sp.parallel.pipeline import own_parameters
from megatron_sp.train.optimizer import local_part, num_copies

#: Name of a kind of tensor in reports -> its key in the optimizer's state; "" for the weights themselves.
KINDS = {"variance": "exp_avg_sq", "momentum": "exp_avg", "weight": ""}


def optimizer_statistics(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: ParallelMesh) -> dict[str, float]:
    """Return L1 norm, L2 norm and largest absolute value of weights and moments, and of the variance's square root.

    All ranks call it.

    Returns:
        values by name, such as ``optimizer/variance_sqrt_l2``; for other optimizers than Adam only the weights'
    """
    sums, largest = {}, {}
    for kind, key in KINDS.items():
        pairs = [(local_part(value).float(), num_copies(p, mesh)) for _, p in own_parameters(model)
                 if (value := optimizer.state.get(p, {}).get(key) if key else p) is not None]
        if key and not isinstance(optimizer, torch.optim.AdamW):
            continue
        forms = {kind: pairs}
        if kind == "variance":
            forms["variance_sqrt"] = [(value.sqrt(), copies) for value, copies in pairs]
        for name, values in forms.items():
            sums[f"{name}_l1"] = _total(value.abs().sum(dtype=torch.float64) / copies for value, copies in values)
            sums[f"{name}_l2"] = _total(value.double().square().sum() / copies for value, copies in values)
            largest[f"{name}_abs_max"] = max((float(value.abs().max()) for value, _ in values if value.numel()),
                                             default=0.0)
    added = mesh.sum_over(torch.tensor(list(sums.values()), dtype=torch.float64), "world").tolist()
    tops = mesh.max_over(torch.tensor(list(largest.values()), dtype=torch.float64), "world").tolist()
    found = {name: value**0.5 if name.endswith("l2") else value for name, value in zip(sums, added)}
    return {f"optimizer/{name}": value for name, value in (found | dict(zip(largest, tops))).items()}


def _total(values: Iterable[torch.Tensor]) -> float:
    return sum(map(float, values))
