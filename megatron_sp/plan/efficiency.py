"""``--memory-efficiency auto``: turn on the memory techniques that a run needs on its devices, and say why.

``plan.techniques`` finds the combination that costs least. The report lists its techniques one by one, each with the
predicted peak before and after it, so that the reader sees what each of them saves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron_sp.config.resolve import resolve
from megatron_sp.config.rules.checks import check_problems
from megatron_sp.config.schema import Memory, Parallel, Run
from megatron_sp.errors import ConfigError
from megatron_sp.plan.devices import GIB, Device
from megatron_sp.plan.lengths import planned_run
from megatron_sp.plan.memory import MemoryPlan, predict
from megatron_sp.plan.report import longest_sequence, with_length
from megatron_sp.plan.step_time import predict_step_time
from megatron_sp.plan.techniques import FLAGS, USABLE, Fit, cheapest, combinations, technique_flags

AUTO = "--memory-efficiency auto"
#: Fields that are turned on together -> why a run wants them.
WHY = {
    ("recompute_granularity", "recompute_method", "recompute_num_layers"):
        "recomputed layers keep less, and backward computes the rest again",
    ("mlp_tile_size",): "feed-forward activations exist for one tile of tokens",
    ("attention_head_groups",): "attention's working memory exists for one group of heads",
    ("sequence_chunk_size",): "activations exist for one chunk of the sequence",
    ("offload_key_values",): "keys and values of earlier chunks are in host memory",
    ("offload_activations",): "what recomputed layers keep is in host memory",
    ("offload_optimizer",): "fp32 weights, gradients and optimizer states are in host memory",
}
#: When nothing fits, plans are made for the number of processes times each of these factors.
MORE_PROCESSES = (2, 4, 8, 16)


def choose_techniques(run: Run, device: Device, devices_per_node: int) -> tuple[Run, list[str]]:
    """Return the run with the techniques that it needs, and lines that say what was turned on and why.

    Flags that the command line gives (``memory.given``) stay as they are. The result depends on the arguments alone, so
    ranks that agree on the device make the same choice. With ``--seq-length-schedule`` the techniques are chosen for
    the longest sequences, or for those of ``--seq-length-phase``.

    Args:
        run: a resolved run with known vocabulary sizes.
        device: what every process has.

    Raises:
        ConfigError: no combination fits. The message says what would.
    """
    if run.data.seq_length_schedule:
        chosen, lines = choose_techniques(planned_run(run), device, devices_per_node)
        return replace(run, memory=chosen.memory), lines
    before = predict(run, device=device.kind)
    fit = None if device.holds(before, USABLE) else cheapest(run, device, devices_per_node)
    room = (f"{_size(_bytes(before, device))} are predicted, of the {_size(USABLE * device.memory)} that a run may use "
            f"({100 * USABLE:.0f}% of {device.name}'s {_size(device.memory)})")
    if device.holds(before, USABLE):
        return run, [f"{AUTO}: turned on nothing, since {room}."]
    if fit is None:
        raise ConfigError(_nothing_fits(run, device, devices_per_node))
    return fit.run, [f"{AUTO}: {room}; turned on:",
                     *_steps(run, fit, device), _price(run, fit, device, devices_per_node)]


def _steps(run: Run, fit: Fit, device: Device) -> Iterator[str]:
    """Yield a line for each technique, with the predicted bytes before and after it."""
    memory, before = run.memory, predict(run, device=device.kind)
    for names, why in WHY.items():
        values = {name: getattr(fit.run.memory, name) for name in names}
        if all(getattr(memory, name) == value for name, value in values.items()):
            continue
        memory = replace(memory, **values)
        after = predict(replace(run, memory=memory), device=device.kind)
        words = technique_flags(replace(Memory(), **values))
        host = f", and {_size(after.host)} in host memory" if after.host != before.host else ""
        yield f"  {' '.join(words)}: {_size(_bytes(before, device))} -> {_size(_bytes(after, device))}{host}; {why}"
        before = after


def _price(run: Run, fit: Fit, device: Device, devices_per_node: int) -> str:
    """Return a line with what the techniques are predicted to cost."""
    plain = predict_step_time(run, device, devices_per_node).total
    share = 100 * (fit.time.total / plain - 1)
    return (f"  predicted cost: {abs(share):.0f}% {'more' if share >= 0 else 'less'} time a step. The same by hand: "
            f"{' '.join(technique_flags(fit.run.memory))}")


def _nothing_fits(run: Run, device: Device, devices_per_node: int) -> str:
    """Return the message for a run that no combination of techniques makes fit."""
    plans = [(predict(tried, device=device.kind), tried) for tried in combinations(run, device.kind)]
    least, tried = min(plans, key=lambda each: max(_bytes(each[0], device) / device.memory,
                                                   each[0].host / max(1, device.host_memory)))
    host = f", and {_size(least.host)} of the {_size(USABLE * device.host_memory)} of host memory for each process" if (
        device.kind == "gpu") else ""
    flags = " ".join(technique_flags(tried.memory)) or "no technique"
    given = [FLAGS[name] for name in run.memory.given if name in FLAGS]
    kept = f" Flags that are given were left as they are ({', '.join(given)})." if given else ""
    cures = list(_cures(run, device, devices_per_node))
    return (f"{AUTO}: no memory technique makes this run fit. The least that is predicted, with {flags}, is "
            f"{_size(_bytes(least, device))} of the {_size(USABLE * device.memory)} that a run may use on {device.name}"
            f"{host}.{kept} "
            + (f"What fits: {'; or '.join(cures)}." if cures else
               "Take devices with more memory, or split the model: --tensor-model-parallel-size, "
               "--pipeline-model-parallel-size; tools/plan.py searches."))


def _cures(run: Run, device: Device, devices_per_node: int) -> Iterator[str]:
    """Yield changes of the command line, as text, with which a plan of the run fits."""
    def fits(tried: Run) -> bool:
        return not check_problems(tried, True) and cheapest(tried, device, devices_per_node) is not None

    length = max((longest_sequence(tried, device, USABLE)
                  for tried in combinations(run, device.kind, any_length=True)), default=0)
    if 0 < length < run.data.seq_length and fits(with_length(run, length)):
        yield f"--seq-length {length}"
    parallel = run.parallel
    if parallel.zero_stage < 3 and parallel.fsdp > 1 and fits(_in_layout(run, replace(parallel, zero_stage=3))):
        yield "--zero-stage 3"
    for times in MORE_PROCESSES:
        more = _in_layout(run, replace(parallel, ulysses=parallel.ulysses * times, zero_stage=3,
                                       world_size=parallel.world_size * times))
        if fits(more):
            yield (f"{more.parallel.world_size} processes with --ulysses-size {more.parallel.ulysses} "
                   "--zero-stage 3")
            return


def _in_layout(run: Run, parallel: Parallel) -> Run:
    """Return the run in another layout, with the groups of its shards derived anew where no flag names their size."""
    derived = run.parallel.fsdp_size == run.parallel.fsdp
    return resolve(replace(run, parallel=replace(parallel, fsdp_size=0 if derived else parallel.fsdp_size)),
                   parallel.world_size)


def _bytes(plan: MemoryPlan, device: Device) -> int:
    """Return the bytes that the device's memory must hold; on a CPU these include offloaded tensors."""
    return plan.total + (plan.host if device.kind == "cpu" else 0)


def _size(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / 2**20:.0f} MiB"
