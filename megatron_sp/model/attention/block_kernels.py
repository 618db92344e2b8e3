"""Kernels that attend to one block of keys and go back through merged results.

What ring and chunked attention are made of: forward gives the log-sum-exp with which blocks are
merged, backward takes the merged output and log-sum-exp. torch's flash kernels are used where this
torch has them (private operators, therefore looked up by name), else a plain one in query blocks.
"""

from __future__ import annotations

import math

import torch

from megatron_sp.model.attention.cores import QUERY_BLOCK, block_attention
from megatron_sp.parallel.ring import BlockKernel, Triple


class PlainKernel:
    """Unfused, in blocks of queries; any device, any type."""

    description = "unfused in query blocks"

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``ring.BlockKernel``."""
        parts = []
        for first in range(0, q.shape[1], QUERY_BLOCK):
            last = min(first + QUERY_BLOCK, q.shape[1])
            seen = last if causal else k.shape[1]
            parts.append(block_attention(q[:, first:last], k[:, :seen], v[:, :seen], first, causal, None))
        return torch.cat([o for o, _ in parts], dim=1), torch.cat([lse for _, lse in parts], dim=2)

    def backward(self, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor,
                 lse: torch.Tensor, causal: bool) -> Triple:
        """See ``ring.BlockKernel``; Dao et al. (arXiv 2205.14135), algorithm 4, in query blocks."""
        wide = torch.promote_types(q.dtype, torch.float32)
        groups, scale = k.shape[2], 1.0 / math.sqrt(q.shape[-1])
        q_, grad_, o_ = (x.to(wide).unflatten(2, (groups, -1)) for x in (q, grad, o))  # [b, t, g, n/g, d]
        k_, v_ = k.to(wide), v.to(wide)
        lse_ = lse.to(wide).unflatten(1, (groups, -1))  # [b, g, n/g, t]
        delta = (grad_ * o_).sum(-1).permute(0, 2, 3, 1)  # [b, g, n/g, t]
        dq, dk, dv = torch.zeros_like(q_), torch.zeros_like(k_), torch.zeros_like(v_)
        for first in range(0, q.shape[1], QUERY_BLOCK):
            rows = slice(first, min(first + QUERY_BLOCK, q.shape[1]))
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


class FlashKernel:
    """torch's fused CPU attention with its log-sum-exp; grouped key/value heads are native."""

    description = "torch's fused attention"

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``ring.BlockKernel``."""
        o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), 0.0, causal)
        return o.transpose(1, 2), lse

    def backward(self, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor,
                 lse: torch.Tensor, causal: bool) -> Triple:
        """See ``ring.BlockKernel``."""
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(x.transpose(1, 2) for x in (grad, q, k, v, o)), lse, 0.0, causal)
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


class GPUFlashKernel:
    """torch's flash attention on a GPU with its log-sum-exp; what it does not take goes the plain way."""

    description = "torch's flash attention"

    def __init__(self) -> None:
        self.plain = PlainKernel()

    def takes(self, q: torch.Tensor) -> bool:
        """Whether this is for the flash kernel: half precision, head width a multiple of 8 up to 256."""
        return q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``ring.BlockKernel``."""
        if not self.takes(q):
            return self.plain.forward(q, k, v, causal)
        spread = q.shape[2] // k.shape[2]
        k, v = (x.repeat_interleave(spread, 2) if spread > 1 else x for x in (k, v))
        o, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), 0.0, causal)
        return o.transpose(1, 2), lse

    def backward(self, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor,
                 lse: torch.Tensor, causal: bool) -> Triple:
        """See ``ring.BlockKernel``."""
        if not self.takes(q):
            return self.plain.backward(grad, q, k, v, o, lse, causal)
        spread = q.shape[2] // k.shape[2]
        wide_k, wide_v = (x.repeat_interleave(spread, 2) if spread > 1 else x for x in (k, v))
        unused = torch.zeros(2, dtype=torch.int64, device=q.device)  # the random state of a dropout of 0
        dq, dk, dv = (x.transpose(1, 2) for x in torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *(x.transpose(1, 2) for x in (grad, q, wide_k, wide_v, o)), lse.contiguous(), None, None, q.shape[1],
            k.shape[1], 0.0, causal, unused, unused))
        if spread > 1:  # the copies' gradients summed
            dk, dv = (x.unflatten(2, (-1, spread)).sum(3, dtype=torch.float32) for x in (dk, dv))
        return dq, dk, dv


def agrees_with_plain(kernel: BlockKernel, device: torch.device) -> bool:
    """Whether a kernel made of private operators does here what it should, on a tiny example.

    An operator whose signature or meaning changed in another torch is thus found before it can harm.
    """
    plain, generator = PlainKernel(), torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(1, 32, heads, 16, generator=generator).to(device, torch.bfloat16)
                     for heads in (4, 2, 2, 4))
    try:
        results = []
        for causal in (True, False):
            o, lse = plain.forward(q, k, v, causal)
            want = (o, lse, *plain.backward(grad, q, k, v, o, lse, causal))
            got = (*kernel.forward(q, k, v, causal), *kernel.backward(grad, q, k, v, o, lse, causal))
            results += [torch.allclose(x.float(), y.float(), rtol=0.05, atol=0.05) for x, y in zip(got, want)]
        return all(results)
    except (RuntimeError, TypeError, NotImplementedError):
        return False


def block_kernel(device: torch.device) -> BlockKernel:
    """The fastest kernel this torch has for a device."""
    if device.type == "cuda" and hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_backward"):
        kernel = GPUFlashKernel()
        return kernel if agrees_with_plain(kernel, device) else PlainKernel()
    names = ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward")
    if device.type == "cpu" and all(hasattr(torch.ops.aten, name) for name in names):
        return FlashKernel()
    return PlainKernel()
