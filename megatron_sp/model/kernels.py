"""Choose the kernels for attention and norms. A run does so once at its start and gives them to every layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from megatron_sp.activations.results import KeptResults
from megatron_sp.config.schema import Run
from megatron_sp.layout.masks.windows import layer_names, layer_windows
from megatron_sp.layout.patterns.choice import layer_patterns
from megatron_sp.layout.sharding import may_overlap_tensor
from megatron_sp.model.attention.block_kernels import ChosenBlockKernel, UnfusedBlockKernel, choose_block_kernel
from megatron_sp.model.attention.cores import AttentionCore, SDPACore, choose_core, failure_warnings
from megatron_sp.model.attention.flash import FlashSearch, Wanted, active_version, find_flash_attention
from megatron_sp.model.attention.flex import FlexAttention, passes_flex_trial
from megatron_sp.model.attention.patterns import PatternAttention
from megatron_sp.model.attention.window import WindowAttention
from megatron_sp.model.loss import adds_products_in_fp32
from megatron_sp.model.norm_kernels import NormKernels, choose_norm_kernels
from megatron_sp.parallel.ring import BlockKernel, Once, every_time
from megatron_sp.torch_internals import tensor_overlap_problem


@dataclass(frozen=True)
class Kernels:
    """The chosen kernels.

    Args:
        core: computes attention on one rank, or between the exchanges of Ulysses.
        block_kernel: computes attention to one block of keys, in a ring or of a chunk of the sequence. Such runs do not
            train with ``core``.
        norms: compute every norm of the model.
        products_in_fp32: see ``loss.adds_products_in_fp32``.
        overlaps_tensor: whether tensor parallelism's collectives overlap with matrix products, as ``--tp-comm-overlap``
            asks. Only the compiler does that, with torch's symmetric memory between the GPUs of a group.
        warnings: sentences for the log on kernels that are installed or usual and cannot be used here.
        results: keeps the results of attention that is made of many calls, for selective recomputation.
    """

    core: AttentionCore
    block_kernel: BlockKernel
    norms: NormKernels
    warnings: tuple[str, ...] = ()
    products_in_fp32: bool = False
    overlaps_tensor: bool = False
    results: KeptResults = field(default_factory=KeptResults)


def choose_kernels(run: Run, device: torch.device, tensor_group: dist.ProcessGroup | None = None, *,
                   find: Callable[[Wanted, torch.device], FlashSearch] | None = None) -> Kernels:
    """Return the kernels of a run. Kernels of other packages are tried on small examples first, which takes a moment.

    All ranks call this together. The order matters: a version of flash attention that takes the place of torch's own is
    chosen and activated before the block kernels are tried, which call the same operators.

    Args:
        tensor_group: the ranks of tensor parallelism, among which ``--tp-comm-overlap`` is tried; all of them call this
            together. None: it is not used.
        find: searches for the fastest version of flash attention; None: ``find_flash_attention``.

    Raises:
        ConfigError: a kernel that the user named cannot be used here.
    """
    kernels = _choose_layer_kernels(run, device, find or find_flash_attention)
    if tensor_group is None or not may_overlap_tensor(run):
        return kernels
    problem = tensor_overlap_problem(tensor_group, device)
    if problem:
        return replace(kernels, warnings=(*kernels.warnings, f"--tp-comm-overlap is not used: {problem}. Tensor "
                                          "parallelism waits for its collectives, as without the flag."))
    return replace(kernels, overlaps_tensor=True)


def _choose_layer_kernels(run: Run, device: torch.device, find: Callable[[Wanted, torch.device],
                                                                         FlashSearch]) -> Kernels:
    """Return the kernels of attention, norms and loss."""
    products_in_fp32 = device.type == "cuda" and adds_products_in_fp32(device)
    choice, dtype = run.train.fused_kernels, getattr(torch, run.precision.dtype)
    results = KeptResults()
    norms = choose_norm_kernels("torch" if choice == "auto" and run.train.compile else choice, device)
    search = find(wanted_flash(run), device) if tries_flash(run, device) else None
    if uses_blocks(run):
        chosen = _block_kernel(run, device, dtype, "ring" if run.parallel.ring > 1 else "chunks")
        core = SDPACore(windowed=WindowAttention(chosen.kernel, results.once),
                        patterned=PatternAttention(chosen.kernel, results.once), once=results.once)
        warnings = failure_warnings(search, run.model.head_dim, chosen.kernel.description) if search else ()
        return Kernels(core, chosen.kernel, norms, norms.warnings + warnings + chosen.warnings, products_in_fp32,
                       results=results)
    windowed: WindowAttention | None = None
    patterned: PatternAttention | FlexAttention | None = None
    missing: tuple[str, ...] = ()
    windows, patterns = any(layer_windows(run.model)), any(layer_patterns(run.model))
    if (windows or patterns) and run.model.attention_dropout == 0 and run.train.attention_backend != "unfused":
        chosen = _block_kernel(run, device, dtype, "window" if windows else "pattern")
        windowed = WindowAttention(chosen.kernel, results.once) if windows else None
        patterned, missing = PatternAttention(chosen.kernel, results.once) if patterns else None, chosen.warnings
        if patterned is not None and device.type == "cuda" and not run.train.compile:
            patterned = try_flex(run, patterned, device, dtype, results.once) or patterned
    found = choose_core(run.train.attention_backend, dropout=run.model.attention_dropout > 0, device=device,
                        dtype=dtype, head_dim=run.model.head_dim, documents=run.data.reset_attention_mask,
                        windowed=windowed, patterned=patterned, search=search, once=results.once)
    inside = getattr(found.core, "inside_documents", None)
    blocks_are_used = (windows and (inside is None or inside.varlen is None)) or isinstance(patterned, PatternAttention)
    warnings = norms.warnings + found.warnings + (missing if blocks_are_used else ())
    return Kernels(found.core, UnfusedBlockKernel(), norms, warnings, products_in_fp32, results=results)


def tries_flash(run: Run, device: torch.device) -> bool:
    """Return whether a run may use another package's flash attention, and so tries all versions at its start."""
    return (device.type == "cuda" and run.precision.dtype != "float32" and run.model.attention_dropout == 0
            and run.train.attention_backend in ("auto", "flash"))


def wanted_flash(run: Run) -> Wanted:
    """Return what a version of flash attention must compute in a run."""
    model = run.model
    return Wanted(run.precision.dtype, model.head_dim, max(1, model.num_attention_heads // model.num_query_groups),
                  whole=not uses_blocks(run), documents=run.data.reset_attention_mask,
                  windows=any(layer_windows(model)), blocks=uses_blocks(run) or any(layer_patterns(model)))


def _block_kernel(run: Run, device: torch.device, dtype: torch.dtype, use: str) -> ChosenBlockKernel:
    wanted = wanted_flash(run)
    return choose_block_kernel(device, dtype, wanted.head_dim, use=use, copies=wanted.copies,
                               active=active_version())


def try_flex(run: Run, otherwise: PatternAttention, device: torch.device, dtype: torch.dtype,
             once: Once = every_time) -> FlexAttention | None:
    """Return FlexAttention if it computes right here with the run's heads in each group, else None.

    FlexAttention brings its own compiled kernel, and has to be called outside of compiled layers. So this is only for
    runs without ``--compile``.
    """
    flex = FlexAttention(otherwise, once=once)
    share = run.model.num_attention_heads // run.model.num_query_groups
    works = passes_flex_trial(flex, device, dtype, run.model.head_dim, 2 * share, 2)
    return flex if works else None


def uses_blocks(run: Run) -> bool:
    """Return whether attention takes its keys in blocks: those of a ring's ranks, or of chunks of the sequence."""
    return run.parallel.ring > 1 or run.memory.sequence_chunk_size > 0


def documents_in_words(run: Run, kernels: Kernels) -> str:
    """Return how the core attends inside documents; "" where tokens see all earlier ones of their sequence."""
    if not run.data.reset_attention_mask:
        return ""
    inside = getattr(kernels.core, "inside_documents", None)
    if inside is None:
        return " with a mask of documents"
    return f" inside documents ({'one call for each' if inside.varlen is None else 'one call for all'})"


def kernels_in_words(run: Run, kernels: Kernels) -> str:
    """Return one line for the log that names the kernels of a run."""
    core = kernels.core.description
    if uses_blocks(run) and run.model.attention_dropout == 0:
        blocks = "a ring" if run.parallel.ring > 1 else f"{run.memory.sequence_chunk_size} tokens"
        attention = f"{kernels.block_kernel.description} (blocks of {blocks})"
    elif run.model.attention_dropout > 0:
        attention = ("unfused in query blocks, several times slower than fused attention, because of "
                     f"--attention-dropout {run.model.attention_dropout:g} (--attention-dropout 0 makes it fast)")
    else:
        attention = core + documents_in_words(run, kernels)
    names = [name for name in layer_names(run.model) if name != "causal"]
    for name in dict.fromkeys(names) if any(layer_windows(run.model)) or any(layer_patterns(run.model)) else ():
        count, layers = names.count(name), run.model.num_layers
        seen = f"within {run.model.window_size} tokens" if name == "sliding-window" else \
            f"to the blocks of {run.model.attention_block_size} tokens of {name}"
        if name != "sliding-window" and isinstance(getattr(kernels.core, "patterned", None), FlexAttention):
            seen += " by FlexAttention"
        attention += f", {seen} in " + ("all layers" if count == layers else f"{count} of {layers} layers")
    fused = " (fused)" if run.optimizer.optimizer != "sgd" else ""
    compiled = "compiled" if run.train.compile else "not compiled"
    compiled += ", tensor-parallel collectives beside products" if kernels.overlaps_tensor else ""
    return f"kernels: attention {attention}; norms {kernels.norms.name}; optimizer torch{fused}; layers {compiled}"
