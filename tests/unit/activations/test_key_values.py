"""What the store keeps of chunks, when it gives it back, and when it forgets it."""

from __future__ import annotations

import pytest
import torch

from megatron_sp.activations.key_values import Chunk, KeyValueStore, Past
from megatron_sp.activations.storage import DeviceStorage, HostStorage, Storage

SHAPE = (1, 4, 2, 8)  # [b, C, g, d]
BYTES = 2 * 4 * 2 * 8 * 4  # of the keys and values of a chunk, in fp32


def past(store: KeyValueStore, number: int, *, keeps: bool = False) -> Past:
    return Chunk(store, number, 4, keeps=keeps).past(layer=0).of_heads(0)


@pytest.mark.parametrize("storage", [DeviceStorage(), HostStorage()], ids=["device", "host"])
def test_a_chunk_sees_earlier_ones_and_gets_what_later_ones_sent(storage: Storage) -> None:
    store = KeyValueStore(storage)
    keys = [torch.randn(SHAPE) for _ in range(3)]
    for number, k in enumerate(keys):
        past(store, number, keeps=number < 2).keep(k, 2 * k)
    assert store.nbytes == 2 * BYTES
    for number, k, v in past(store, 2).blocks(range(2)):
        assert torch.equal(k, keys[number]) and torch.equal(v, 2 * keys[number])
    for later in (2, 1):
        for number, *_ in past(store, later).blocks(range(later), with_gradients=True):
            past(store, later).add_gradient(number, torch.full(SHAPE, 1.0), torch.full(SHAPE, float(later)))
    assert past(store, 2).take_gradient() is None
    for number, (dk, dv) in ((1, (1.0, 2.0)), (0, (2.0, 3.0))):
        gradient = past(store, number).take_gradient()
        assert gradient is not None and bool((gradient[0] == dk).all()) and bool((gradient[1] == dv).all())
    assert store.nbytes == 0


def test_gradients_of_half_precision_are_summed_in_fp32() -> None:
    store = KeyValueStore()
    past(store, 0, keeps=True).keep(*torch.zeros(2, *SHAPE, dtype=torch.bfloat16))
    for _ in range(300):  # 257 is no number of bf16
        past(store, 1).add_gradient(0, *torch.ones(2, *SHAPE, dtype=torch.bfloat16))
    gradient = past(store, 0).take_gradient()
    assert gradient is not None and gradient.dtype == torch.float32 and bool((gradient == 300).all())


def test_layers_and_groups_of_heads_are_kept_apart() -> None:
    store = KeyValueStore()
    chunk = Chunk(store, 0, 4, keeps=True)
    for layer, head in ((0, 0), (0, 4), (1, 0)):
        chunk.past(layer).of_heads(head).keep(*torch.full((2, *SHAPE), float(10 * layer + head)))
    ((_, k, _),) = Chunk(store, 1, 4).past(0).of_heads(4).blocks([0])
    assert bool((k == 4).all()) and store.nbytes == 3 * BYTES


def test_host_storage_does_not_share_memory_with_what_it_keeps() -> None:
    x = torch.ones(3)
    stored = HostStorage().put(x)
    x.zero_()
    assert stored.value.tolist() == [1, 1, 1]
