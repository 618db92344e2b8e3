"""How many tokens the loss computes at a time."""

from __future__ import annotations

import pytest

from megatron_sp.layout.tiles import GPU_TILE_LOGITS, loss_tile


@pytest.mark.parametrize("columns", [128_256, 50_304, 32_000, 129_280 // 8, 1_000, 10**7])
def test_a_tile_on_a_gpu_fills_whole_blocks_of_a_matrix_product(columns: int) -> None:
    tile = loss_tile(columns, on_cpu=False)
    assert tile % 128 == 0 and tile >= 128
    assert tile == 128 or tile * columns <= GPU_TILE_LOGITS < (tile + 128) * columns
