"""What a user reads who runs a torch version that lacks internals the package needs."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.pipelining import schedules

from megatron_sp import torch_internals
from megatron_sp.errors import InstallationError


def test_the_installed_torch_has_everything() -> None:
    torch_internals.check_torch()


def test_the_message_names_the_version_and_all_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "9.8.7")
    monkeypatch.delattr(torch_internals.functional, "wait_tensor")
    monkeypatch.delattr(schedules, "_ComputationType")
    with pytest.raises(InstallationError) as error:
        torch_internals.check_torch()
    message = str(error.value)
    assert message.startswith("torch 9.8.7 lacks ")
    assert "wait_tensor" in message and "torch.distributed._functional_collectives" in message
    assert "action types F, B, I and W of torch.distributed.pipelining" in message
    assert torch_internals.ALL_TO_ALL_OPERATOR not in message, "the operator is there"
    assert f"Install a version from {torch_internals.OLDEST} up" in message


@pytest.mark.parametrize("names", [("all_gather_single", "all_gather_tensor"),
                                   ("reduce_scatter_single", "reduce_scatter_tensor")])
def test_a_collective_may_have_its_old_or_its_new_name_but_needs_one(monkeypatch: pytest.MonkeyPatch,
                                                                     names: tuple[str, str]) -> None:
    new, old = names
    function = torch_internals._find_collective(new, old)
    for only in names:
        for name in names:
            monkeypatch.delattr(torch_internals.functional, name, raising=False)
        monkeypatch.setattr(torch_internals.functional, only, function, raising=False)
        torch_internals.check_torch()
    monkeypatch.delattr(torch_internals.functional, only)
    with pytest.raises(InstallationError, match="an all-gather and a reduce-scatter"):
        torch_internals.check_torch()
