"""Dropout at every site against the plain model with the same masks, in fp64; and what dropout does to a mean."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_sp.model.attention.cores import AttentionCore, SDPACore, UnfusedCore
from megatron_sp.model.attention.unfused import AttentionDropout
from megatron_sp.parallel.random import Dropout, token_keys
from megatron_sp.proof.data import batch
from megatron_sp.proof.reference import dropout_sites, keep_all, keyed_dropout, random_weights, reference_loss
from megatron_sp.proof.steps import differences, reference_step, step_in_layout
from tests.helpers.configs import STYLES, tiny_run
from tests.helpers.spawn import run_ranks

#: Two different probabilities, so that the test notices when one is used in the place of the other.
DROPOUT = "--hidden-dropout 0.2 --attention-dropout 0.3"
LAYOUTS = {1: [""], 2: ["--ulysses-size 2", "--tensor-model-parallel-size 2 --sequence-parallel"]}


def worst_by_case(world: int) -> dict[str, float]:
    """Run on one rank; return the largest relative difference of loss, norm and gradients, by style and layout."""
    found = {}
    for style in ("llama", "gpt2"):
        for layout in LAYOUTS[world]:
            run = tiny_run(f"{STYLES[style]} {DROPOUT} {layout}".split(), world)
            weights, data = random_weights(run), batch(run, "ragged")
            expected = reference_step(run, weights, *data, keyed_dropout(run))
            found[f"{style} {layout}"] = max(differences(step_in_layout(run, weights, *data), expected).values())
    return found


@pytest.mark.parametrize("world", LAYOUTS)
def test_every_site_drops_as_in_the_plain_model(world: int) -> None:
    for found in run_ranks(worst_by_case, world, world):
        assert len(found) == 2 * len(LAYOUTS[world]) and max(found.values()) < 1e-9, found


def test_the_plain_model_drops_at_every_site_once() -> None:
    """Each site matters: without any one of them the loss is another."""
    run = tiny_run(f"{STYLES['llama']} {DROPOUT}".split())
    weights, data = random_weights(run), batch(run)
    drop, seen = keyed_dropout(run), []

    def without(skipped: str) -> float:
        def some(site: str, x: Tensor, head: int | None = None) -> Tensor:
            seen.append((site, head or 0))
            return (keep_all if site == skipped else drop)(site, x, head)
        return float(reference_loss(weights, run, *data, drop=some)[0])

    whole = without("")
    sites = dropout_sites(run.model)
    heads = {site: range(4) if site.endswith("/attention") else range(1) for site in sites}
    assert sorted(seen) == sorted((site, head) for site in sites for head in heads[site])
    assert len(sites) == 7 and all(abs(without(site) / whole - 1) > 1e-6 for site in sites)


@pytest.mark.parametrize("core", [UnfusedCore(), SDPACore()], ids=["unfused", "sdpa"])
def test_attention_loses_its_share_of_probabilities_and_none_of_its_mean(core: AttentionCore) -> None:
    """Equal scores and v = 1: the output has head and query means of kept / (keys x (1 - p)), 1 on average."""
    probability, length, width = 0.25, 600, 1     # two blocks of queries
    q = torch.zeros(1, length, 4, width, dtype=torch.float64)
    v = torch.ones(1, length, 4, width, dtype=torch.float64)
    dropout = AttentionDropout(Dropout(probability, 1, "0/attention"), torch.tensor([3]), 0)
    o = core(q, q, v, dropout=dropout)[0, :, :, 0]            # [s, n]
    seen = torch.arange(1, length + 1, dtype=torch.float64).unsqueeze(1)
    kept = o * seen * (1 - probability)                                    # whole numbers: how many were kept
    torch.testing.assert_close(kept, kept.round(), rtol=0, atol=1e-9)
    deviation = math.sqrt(probability * (1 - probability) / float(4 * seen.sum()))
    assert abs(1 - float(kept.sum() / (4 * seen.sum())) - probability) < 4 * deviation
    assert abs(float((o * seen).sum() / (4 * seen.sum())) - 1) < 4 * deviation / (1 - probability)


def test_hidden_states_lose_their_share_and_none_of_their_mean() -> None:
    samples, places = torch.arange(2), torch.arange(500)
    dropped = Dropout(0.25, 1, "site").hidden(torch.full((2, 500, 200), 3.0),
                                              token_keys(samples, places))
    deviation = math.sqrt(0.25 * 0.75 / dropped.numel())
    assert abs(float((dropped == 0).double().mean()) - 0.25) < 4 * deviation
    assert abs(float(dropped.double().mean()) / 3 - 1) < 4 * deviation / 0.75
