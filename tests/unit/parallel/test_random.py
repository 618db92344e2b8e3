"""Keyed masks: replayable, distinct where they must be, and of the right rate."""

import subprocess
import sys

import torch

from megatron_sp.parallel.random import Dropout, stable_key


def test_keys_do_not_depend_on_the_process() -> None:
    code = "from megatron_sp.parallel.random import stable_key; print(stable_key(1, 'a', 2))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                           env={"PYTHONHASHSEED": "7", "PATH": ""})
    assert int(other.stdout) == stable_key(1, "a", 2)


def test_masks_differ_between_samples_sites_and_shards_and_repeat_otherwise() -> None:
    x = torch.ones(2, 16, 32)
    drop = Dropout(0.25, 1234, "0/mlp")
    first = drop.hidden(x, (5, 6), 0)
    assert torch.equal(first, drop.hidden(x, (5, 6), 0))
    assert not torch.equal(first[0], first[1])
    assert torch.equal(first[1], drop.hidden(x, (6, 7), 0)[0])
    assert not torch.equal(first, drop.hidden(x, (5, 6), 16))
    assert not torch.equal(first, Dropout(0.25, 1234, "1/mlp").hidden(x, (5, 6), 0))
    assert not torch.equal(first, Dropout(0.25, 1235, "0/mlp").hidden(x, (5, 6), 0))


def test_rate_and_scale() -> None:
    dropped = Dropout(0.25, 1, "site").hidden(torch.ones(1, 500, 200), (0,), 0)
    assert abs((dropped == 0).double().mean().item() - 0.25) < 0.01
    assert torch.equal(dropped.unique(), torch.tensor([0.0, 1 / 0.75]))


def test_probability_zero_returns_the_tensor_itself() -> None:
    x = torch.ones(1, 2, 3)
    assert Dropout(0.0, 1, "site").hidden(x, (0,), 0) is x
