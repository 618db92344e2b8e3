"""Block kernels for rings and chunks: attention to one block of the keys, forward and backward.

An attention core sees all keys. A block kernel sees some of them: its forward also returns the log-sum-exp of the
scores, with which the caller merges the results of several blocks, and its backward takes the merged output and
log-sum-exp. The fast kernels call private operators of torch (``torch_internals``), which another version of torch may
change or drop. So a run uses them only where they exist and, on a GPU, give the results of the unfused kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron_sp import torch_internals
from megatron_sp.model.attention.cores import HALF, copy_heads
from megatron_sp.model.attention.unfused import block_attention, query_blocks
from megatron_sp.parallel.ring import BlockKernel, Triple


class UnfusedBlockKernel:
    """Forms the probabilities, for one block of queries at a time; works on any device with any type, and is slow."""

    description = "unfused in query blocks"

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output [b, t, n, d] and the log-sum-exp [b, n, t] of one block; see ``ring.BlockKernel``."""
        parts = []
        for rows in query_blocks(q.shape[1]):
            seen = rows.stop if causal else k.shape[1]
            parts.append(block_attention(q[:, rows], k[:, :seen], v[:, :seen], rows.start, causal, None))
        return torch.cat([o for o, _ in parts], dim=1), torch.cat([lse for _, lse in parts], dim=2)

    def backward(self, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor,
                 lse: torch.Tensor, causal: bool) -> Triple:
        """Return the gradients of q, k and v (Dao et al., arXiv 2205.14135, algorithm 4); see ``ring.BlockKernel``."""
        wide = torch.promote_types(q.dtype, torch.float32)
        groups, scale = k.shape[2], 1.0 / math.sqrt(q.shape[-1])
        q_, grad_, o_ = (x.to(wide).unflatten(2, (groups, -1)) for x in (q, grad, o))  # [b, t, g, n/g, d]
        k_, v_ = k.to(wide), v.to(wide)
        lse_ = lse.to(wide).unflatten(1, (groups, -1))  # [b, g, n/g, t]
        delta = (grad_ * o_).sum(-1).permute(0, 2, 3, 1)  # [b, g, n/g, t]
        dq, dk, dv = torch.zeros_like(q_), torch.zeros_like(k_), torch.zeros_like(v_)
        for rows in query_blocks(q.shape[1]):
            keys = slice(0, rows.stop if causal else k.shape[1])
            scores = torch.einsum("bqgrd,bkgd->bgrqk", q_[:, rows], k_[:, keys]) * scale
            if causal:
                position = torch.arange(rows.start, rows.stop, device=q.device).unsqueeze(1)
                scores = scores.masked_fill(torch.arange(keys.stop, device=q.device) > position, -torch.inf)
            p = (scores - lse_[..., rows].unsqueeze(-1)).exp()
            dv[:, keys] += torch.einsum("bgrqk,bqgrd->bkgd", p, grad_[:, rows])
            dp = torch.einsum("bqgrd,bkgd->bgrqk", grad_[:, rows], v_[:, keys])
            ds = p * (dp - delta[..., rows].unsqueeze(-1)) * scale
            dq[:, rows] = torch.einsum("bgrqk,bkgd->bqgrd", ds, k_[:, keys])
            dk[:, keys] += torch.einsum("bgrqk,bqgrd->bkgd", ds, q_[:, rows])
        return dq.flatten(2, 3), dk, dv


class CPUFlashBlockKernel:
    """torch's fused attention for CPUs, which takes grouped key/value heads as they are."""

    description = "torch's fused attention"

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output [b, t, n, d] and the log-sum-exp [b, n, t] of one block; see ``ring.BlockKernel``."""
        o, lse = torch_internals.cpu_flash_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal)
        return o.transpose(1, 2), lse

    def backward(self, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor,
                 lse: torch.Tensor, causal: bool) -> Triple:
        """Return the gradients of q, k and v; see ``ring.BlockKernel``."""
        grad, q, k, v, o = (x.transpose(1, 2) for x in (grad, q, k, v, o))
        dq, dk, dv = torch_internals.cpu_flash_attention_backward(grad, q, k, v, o, lse, causal)
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


class GPUFlashBlockKernel:
    """torch's flash attention for GPUs; half precision, head widths that are multiples of 8 up to 256.

    It takes grouped key/value heads as they are. Where a version of torch's registry is active, that version computes.
    """

    description = "torch's flash attention"

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output [b, t, n, d] and the log-sum-exp [b, n, t] of one block; see ``ring.BlockKernel``."""
        return torch_internals.gpu_flash_attention(q, k, v, causal)

    def backward(self, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor,
                 lse: torch.Tensor, causal: bool) -> Triple:
        """Return the gradients of q, k and v; see ``ring.BlockKernel``."""
        return torch_internals.gpu_flash_attention_backward(grad, q, k, v, o, lse, causal)


class NamedKernel:
    """A block kernel that the log calls by another name."""

    def __init__(self, kernel: BlockKernel, description: str):
        self.forward, self.backward, self.description = kernel.forward, kernel.backward, description


class CopyingGPUFlashBlockKernel:
    """The same attention through the operators of ``scaled_dot_product_attention``, which take no grouped heads.

    So each query head gets a copy of its key/value head. This serves where ``GPUFlashBlockKernel`` does not pass its
    trial.
    """

    description = "torch's flash attention with copied key/value heads"

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output [b, t, n, d] and the log-sum-exp [b, n, t] of one block; see ``ring.BlockKernel``."""
        k, v = copy_heads(k, q.shape[2]), copy_heads(v, q.shape[2])
        o, lse = torch_internals.gpu_sdpa_flash(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal)
        return o.transpose(1, 2), lse

    def backward(self, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor,
                 lse: torch.Tensor, causal: bool) -> Triple:
        """Return the gradients of q, k and v, a head's copies summed in fp32; see ``ring.BlockKernel``."""
        copies = q.shape[2] // k.shape[2]
        k, v = copy_heads(k, q.shape[2]), copy_heads(v, q.shape[2])
        grad, q, k, v, o = (x.transpose(1, 2) for x in (grad, q, k, v, o))
        dq, dk, dv = (x.transpose(1, 2) for x in torch_internals.gpu_sdpa_flash_backward(grad, q, k, v, o, lse, causal))
        if copies > 1:  # the gradient of a head is the sum over its copies
            dk, dv = (x.unflatten(2, (-1, copies)).sum(3, dtype=torch.float32) for x in (dk, dv))
        return dq, dk, dv


def gpu_kernels() -> tuple[BlockKernel, ...]:
    """Return the block kernels for GPUs, the fastest first."""
    return GPUFlashBlockKernel(), CopyingGPUFlashBlockKernel()


def first_that_agrees(kernels: Sequence[BlockKernel], device: torch.device, head_dim: int,
                      dtype: torch.dtype = torch.bfloat16, copies: int = 2) -> BlockKernel | None:
    """Return the first kernel that passes ``agrees_with_unfused``, or None."""
    return next((kernel for kernel in kernels if agrees_with_unfused(kernel, device, head_dim, dtype, copies)), None)


def agrees_with_unfused(kernel: BlockKernel, device: torch.device, head_dim: int = 16,
                        dtype: torch.dtype = torch.bfloat16, copies: int = 2) -> bool:
    """Return whether a kernel gives what ``UnfusedBlockKernel`` gives, forward and backward, on small examples.

    The examples are those of a ring: a square of queries and keys with the causal mask, the later half of the queries
    with all keys, all queries with the earlier half of the keys, and one query, for which kernels take another way.
    This finds an operator that has another signature or meaning in this torch before a run relies on it.

    Args:
        copies: query heads of each key/value head.
    """
    unfused, generator = UnfusedBlockKernel(), torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(2, 32, heads, head_dim, generator=generator).to(device, dtype)
                     for heads in (2 * copies, 2, 2, 2 * copies))
    half, whole, one = slice(0, 16), slice(0, 32), slice(5, 6)
    try:
        results = []
        for asked, seen, causal in ((whole, whole, True), (slice(16, 32), whole, False), (whole, half, False),
                                    (one, half, False), (one, one, True)):
            given = q[:, asked], k[:, seen], v[:, seen]
            o, lse = unfused.forward(*given, causal)
            want = (o, lse, *unfused.backward(grad[:, asked], *given, o, lse, causal))
            got = (*kernel.forward(*given, causal), *kernel.backward(grad[:, asked], *given, o, lse, causal))
            results += [x.shape == y.shape and torch.allclose(x.float(), y.float(), rtol=0.05, atol=0.05)
                        for x, y in zip(got, want, strict=True)]
        return all(results)
    except Exception:  # noqa: BLE001 (another package's kernel may raise anything)
        return False


class Use(NamedTuple):
    """How warnings name what attends with blocks, and what to use instead."""

    who: str
    cure: str


USES = {"ring": Use("the ring attends", "use --ulysses-size instead of --ring-size"),
        "chunks": Use("chunks of the sequence attend", "leave --sequence-chunk-size out"),
        "window": Use("the sliding window attends", "leave --window-size out"),
        "pattern": Use("the pattern of blocks attends", "leave --attention-pattern out")}


@dataclass(frozen=True)
class ChosenBlockKernel:
    """The block kernel of a run, and warnings for the log about the choice."""

    kernel: BlockKernel
    warnings: tuple[str, ...] = ()


def choose_block_kernel(device: torch.device, dtype: torch.dtype, head_dim: int, *, use: str = "ring",
                        copies: int = 2, active: str = "") -> ChosenBlockKernel:
    """Return the fastest block kernel that takes this type and head width and computes right on the device.

    Args:
        dtype: the type in which attention computes.
        use: what the blocks are of, a key of ``USES``; for warnings.
        copies: query heads of each key/value head.
        active: what computes in place of torch's flash attention, in words, if another version is active.
    """
    kernel: BlockKernel = CPUFlashBlockKernel() if device.type == "cpu" else GPUFlashBlockKernel()
    changed = (f"does not work in torch {torch.__version__}, whose operators are missing or have changed. Install a "
               "torch version that the requirements name, or "
               + USES[use].cure)
    if device.type == "cpu":
        reason = "" if torch_internals.has_cpu_flash_attention() else changed
    elif dtype not in HALF:
        reason = "computes in half precision only. Give --bf16"
    elif head_dim % 8 or head_dim > 256:
        reason = (f"takes head widths that are multiples of 8 up to 256, and this model has {head_dim}. Choose another "
                  "--kv-channels")
    else:
        found = first_that_agrees(gpu_kernels(), device, head_dim, dtype, copies)
        kernel, reason = found or kernel, "" if found else changed
    if not reason:
        return ChosenBlockKernel(NamedKernel(kernel, active) if active else kernel)
    return ChosenBlockKernel(UnfusedBlockKernel(), (
        f"{USES[use].who} unfused, which is many times slower, because {kernel.description} {reason}.",))
