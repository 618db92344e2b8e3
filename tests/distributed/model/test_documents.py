"""Documents of a sequence are separate to the bit: a token of one changes no loss of another, in any layout."""

from __future__ import annotations

import torch

from megatron_sp.layout.tokens import SequenceLayout
from megatron_sp.model.build import build_model
from megatron_sp.parallel.mesh import ParallelMesh
from megatron_sp.proof.data import END, batch, local_microbatches
from megatron_sp.train.chunk_recurrence import Part
from tests.helpers.configs import STYLES, tiny_run
from tests.helpers.spawn import RunRanks

BASE = (f"{STYLES['llama']} --micro-batch-size 2 --global-batch-size 2 --reset-position-ids --reset-attention-mask "
        "--eod-mask-loss")
LAYOUTS = ["--ulysses-size 2", "--ring-size 2", "--tensor-model-parallel-size 2 --sequence-parallel",
           "--ulysses-size 2 --attention-head-groups 2 --attention-core unfused --document-boundaries eod"]
#: Places at which a document ends in both sequences, and the place of a token of the second document.
ENDS, CHANGED = (9, 30, 47), 20


def losses(layout: str, changed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """On a rank: the loss of each of its tokens in fp32 [b, s/sp], and the places of these tokens [s/sp]."""
    run = tiny_run(f"{BASE} {layout}".split(), 2)
    mesh = ParallelMesh.build(run.parallel)
    tokens, _ = batch(run)
    tokens = tokens.clamp(min=END + 1)
    tokens[:, list(ENDS)] = END
    if changed:
        tokens[0, CHANGED] += 7
    labels = tokens.roll(-1, dims=1).masked_fill(tokens == END, -100)
    [mine] = local_microbatches(run, mesh, tokens, labels)
    assert mine.mask.documents == ((0, *(end + 1 for end in ENDS)),) * 2
    with torch.no_grad():
        tokens, labels, context = Part().of(mine)
        found = build_model(run, mesh).eval()(tokens, context, labels=labels, reduction="none")
    return found, torch.from_numpy(SequenceLayout.of(run).positions(mesh.rank("sp")))


def compare(layouts: list[str]) -> list[tuple[int, int]]:
    """On a rank: for each layout, how many losses inside and outside of the changed document differ in any bit."""
    found = []
    for layout in layouts:
        (first, places), (second, _) = (losses(layout, changed) for changed in (False, True))
        differ, inside = first != second, torch.zeros_like(first, dtype=torch.bool)
        inside[0] = (places > ENDS[0]) & (places <= ENDS[1])
        found.append((int(differ[inside].sum()), int(differ[~inside].sum())))
    return found


def test_a_token_changes_no_bit_of_other_documents(ranks: RunRanks) -> None:
    results = ranks(compare, 2, LAYOUTS)
    for layout, of_ranks in zip(LAYOUTS, zip(*results)):
        assert sum(inside for inside, _ in of_ranks) >= 10, f"{layout}: the losses of the changed document change"
        assert [outside for _, outside in of_ranks] == [0, 0], layout
