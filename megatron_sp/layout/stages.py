"""Which layers each pipeline stage holds; pure arithmetic, also used to check the command line."""

from __future__ import annotations

from megatron_sp.config.schema import Model, Parallel


def split_layers(num_layers: int, num_stages: int, *, first_cost: float = 0.0, last_cost: float = 0.0) -> list[range]:
    """Divide the layers into stages so that the stage with the most work has as little as possible.

    Args:
        first_cost, last_cost: work of the embedding and of the output layer with its loss, in layers.
    """
    assert num_stages <= num_layers
    counts = [1] * num_stages
    load = [1.0] * num_stages
    load[0] += first_cost
    load[-1] += last_cost
    for _ in range(num_layers - num_stages):
        stage = min(range(num_stages), key=lambda i: (load[i], i))
        counts[stage] += 1
        load[stage] += 1.0
    return runs(counts)


def runs(counts: list[int]) -> list[range]:
    """Return consecutive ranges of these lengths."""
    bounds = [sum(counts[:stage]) for stage in range(len(counts) + 1)]
    return [range(start, stop) for start, stop in zip(bounds, bounds[1:])]


def output_cost(model: Model) -> float:
    """Return the work of the output layer and its loss, as a number of transformer layers."""
    mlp = (3 if model.is_gated else 2) * model.ffn_hidden_size
    heads = (2 * model.num_attention_heads + 2 * model.num_query_groups) * model.kv_channels
    return model.vocab_size / max(1, mlp + heads)


def stage_layers(model: Model, parallel: Parallel) -> list[range]:
    """Return the layers of every stage of a resolved run, in order."""
    num_stages = parallel.pp * max(1, parallel.stages_per_rank)
    if num_stages == 1:
        return [range(model.num_layers)]
    if parallel.pipeline_layers:
        return runs(list(parallel.pipeline_layers))
    if model.num_layers % num_stages == 0:
        return runs([model.num_layers // num_stages] * num_stages)
    return split_layers(model.num_layers, num_stages, last_cost=output_cost(model))
