"""What the stored chunks of a tensor must be."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

from megatron_sp.checkpoint.verification import describe_gaps


@pytest.mark.parametrize("chunks, words", [
    ([((0, 0), (4, 3))], ""), ([((0, 0), (2, 3)), ((2, 0), (2, 3))], ""), ([((2, 0), (2, 3)), ((0, 0), (2, 3))], ""),
    ([], "hold 0 elements of a tensor of 12"), ([((0, 0), (3, 3))], "hold 9 elements of a tensor of 12"),
    ([((0, 0), (4, 3)), ((1, 0), (1, 3))], "hold 15 elements of a tensor of 12"),
    ([((0, 0), (2, 3)), ((0, 0), (2, 3))], "hold 12 elements of a tensor of 12"),     # the same half twice
    ([((0, 0), (2, 3)), ((3, 0), (2, 3))], "lies outside the tensor")])
def test_chunks_make_up_the_tensor(chunks: list[tuple[tuple[int, ...], tuple[int, ...]]], words: str) -> None:
    stored = [ChunkStorageMetadata(torch.Size(offset), torch.Size(size)) for offset, size in chunks]
    entry = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size((4, 3)), stored)
    found = describe_gaps("model.weight", entry)
    assert words in found and bool(found) == bool(words)
