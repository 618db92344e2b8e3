"""The plain model that all proofs compare with: a GPT and its training, written directly from the mathematics.

It runs on one process, on whole sequences and whole weights, without parallel code. It uses only one part of the
framework: the types of the configuration. The loss, clipping, the learning rate and dropout are written here a second
time, so that a fault in the framework is not repeated in the model that should reveal it.

Letters in shapes: B sequences of a global batch, s tokens of a sequence, h hidden size, n query heads, g key/value
heads, d head width, V vocabulary without padding. Weights are ``[out, in]`` and have the names of the framework's
parameters.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from megatron_sp.config.schema import Model, Run
from megatron_sp.proof.reference_masks import visible_keys

Weights = dict[str, Tensor]
#: Tokens and labels of a global batch, each ``[B, s]`` int64; labels are -100 where there is no loss.
Batch = tuple[Tensor, Tensor]
#: ``drop(site, x)`` returns x after the dropout at this place of the model; ``drop(site, x, head)`` does so for the
#: attention probabilities of a head.
Drop = Callable[..., Tensor]
#: ``documents(tokens, first)`` returns for each token of a global batch the number of its document in its sequence,
#: ``[B, s]``, from the tokens and the number of the batch's first sample in the training order.
Numbering = Callable[[Tensor, int], Tensor]
#: ``dropout(first)`` returns the ``Drop`` for a global batch whose first sample has this number in the training order.
Dropping = Callable[[int], Drop]


@dataclass
class Step:
    """The results of one training step: whole tensors by parameter name, without padding of the vocabulary."""

    loss: float  # nats per valid token
    grad_norm: float  # before clipping
    gradients: Weights  # before clipping
    weights: Weights = field(default_factory=dict)  # after the update
    learning_rate: float = 0.0


def keep_all(site: str, x: Tensor, head: int | None = None) -> Tensor:
    """Return x unchanged: the ``Drop`` of a model without dropout."""
    return x


def one_document(tokens: Tensor, first_sample: int = 0) -> Tensor:
    """Return 0 for every token: each sequence is one document."""
    return torch.zeros_like(tokens)


def documents_after(end: int) -> Numbering:
    """Return the numbering in which a new document starts after each token ``end``."""
    def number(tokens: Tensor, first_sample: int = 0) -> Tensor:
        return torch.cumsum(tokens == end, dim=1) - (tokens == end).long()

    return number


def dropout_sites(model: Model) -> list[str]:
    """Return the names of all places with dropout: the embedding, and in each layer the attention and both branches."""
    places = ("attention", "attention-output", "mlp-output")
    return ["embedding", *(f"{layer}/{place}" for layer in range(model.num_layers) for place in places)]


def keyed_dropout(run: Run, first_sample: int = 0) -> Drop:
    """Return the dropout of a global batch, with the same masks that the framework draws for its samples.

    Whether an element is dropped depends on the seed, the place in the model, the number of the sample, the token's
    place in its sequence and the channel, or on the query's place, the head and the key's place. No layout changes it.

    Args:
        run: gives the dropout probabilities and the seed.
        first_sample: number of the batch's first sample in the training order.
    """
    def drop(site: str, x: Tensor, head: int | None = None) -> Tensor:
        probability = run.model.hidden_dropout if head is None else run.model.attention_dropout
        if probability == 0:
            return x
        digest = hashlib.blake2b(f"{run.train.seed}/{site}".encode(), digest_size=8).digest()
        ours = int.from_bytes(digest, "little") // 2
        samples, rows, columns = (np.arange(count, dtype=np.uint64) for count in x.shape)
        high, low = _shuffled(_PI, samples[:, None] + np.uint64(first_sample))
        high, low = _shuffled((high, low), rows)  # [B, s]
        if head is not None:
            high, low = _shuffled((high, low), np.full_like(rows, head))
        high, low = high ^ np.uint64(ours % 2**31), low ^ np.uint64(ours // 2**31 % 2**31)
        mixed = _middle(high[:, :, None] ^ _shuffled(_PI, columns)[0]) ^ low[:, :, None]  # [B, s, h] or [B, s, s]
        share = (mixed * np.uint64(0x5851F42D) % np.uint64(2**32)).astype(np.float64) / 2**32  # even in [0, 1)
        return torch.where(torch.from_numpy(share < round(probability * 2**32) / 2**32), torch.zeros_like(x),
                           x / (1 - probability))

    return drop


#: The pair of 31-bit words that every key of dropout starts with.
_PI = np.array(0x243F6A88, dtype=np.uint64), np.array(0x05A308D3, dtype=np.uint64)


def _middle(word: np.ndarray) -> np.ndarray:
    """Return bits 16 to 46 of the products of 31-bit words and a constant."""
    return word * np.uint64(0x6C8E9CF5) // np.uint64(2**16) % np.uint64(2**31)


def _shuffled(key: tuple[np.ndarray, np.ndarray], number: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return keys of dropout, pairs of 31-bit words, into which numbers were shuffled by a Feistel network."""
    left, right = key[0] ^ number % np.uint64(2**31), key[1] ^ number // np.uint64(2**31)
    for _ in range(4):
        left, right = right ^ _middle(left), left
    return left, right


def reference_training(weights: Weights, run: Run, batches: Sequence[Batch],
                       dropout: Dropping = lambda first: keep_all,
                       documents: Numbering = one_document) -> list[Step]:
    """Train the plain model and return one ``Step`` for each batch.

    The loss is the mean over the valid tokens of the global batch. Gradients are clipped by their global norm. Weight
    decay applies to matrices only. The learning rate follows the run's schedule.

    Args:
        weights: whole tensors by parameter name, before the first step.
        run: gives the model, the optimizer and the schedule.
        batches: one global batch for each step.
        dropout: returns the dropout of a batch from the number of its first sample; default: no dropout.
        documents: numbers the documents; the run's flags say what they change.
    """
    leaves = {name: value.clone().requires_grad_() for name, value in weights.items()}
    optimizer = _optimizer(run, list(leaves.values()))
    steps, consumed = [], 0
    for tokens, labels in batches:
        optimizer.zero_grad()
        loss_sum, count = reference_loss(leaves, run, tokens, labels, documents(tokens, consumed), dropout(consumed))
        (loss_sum / count).backward()
        gradients: Weights = {}
        for name, leaf in leaves.items():
            assert leaf.grad is not None, f"{name} takes no part in the reference"
            gradients[name] = leaf.grad.clone()
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))
        clip = run.optimizer.clip_grad
        factor = min(1.0, clip / (norm + 1e-6)) if clip > 0 else 1.0
        for name, leaf in leaves.items():
            leaf.grad = gradients[name] * factor
        rate = learning_rate(run, consumed)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        consumed += len(tokens)
        after = {name: leaf.detach().clone() for name, leaf in leaves.items()}
        steps.append(Step(float(loss_sum.detach()) / count, norm, gradients, after, rate))
    return steps


def learning_rate(run: Run, consumed: int) -> float:
    """Return the learning rate of the step that starts after ``consumed`` samples.

    It rises linearly from lr-warmup-init to lr during the warm-up. Then it decays linearly or like a cosine to min-lr,
    or stays at lr (style constant). The decay ends after lr-decay-iters, or at the end of the training.
    """
    flags, batch = run.schedule, run.train.global_batch_size
    warmup, horizon = flags.lr_warmup_iters * batch, (flags.lr_decay_iters or run.train.train_iters) * batch
    assert flags.lr_decay_style in ("constant", "linear", "cosine"), flags.lr_decay_style
    if consumed < warmup:
        return flags.lr_warmup_init + (flags.lr - flags.lr_warmup_init) * consumed / warmup
    if flags.lr_decay_style == "constant":
        return flags.lr
    done = min(1.0, (consumed - warmup) / (horizon - warmup))
    height = 1 - done if flags.lr_decay_style == "linear" else (1 + math.cos(math.pi * done)) / 2
    return flags.min_lr + (flags.lr - flags.min_lr) * height


def _optimizer(run: Run, leaves: list[Tensor]) -> torch.optim.Optimizer:
    flags = run.optimizer
    groups = [{"params": [leaf for leaf in leaves if leaf.ndim >= 2], "weight_decay": flags.weight_decay},
              {"params": [leaf for leaf in leaves if leaf.ndim < 2], "weight_decay": 0.0}]
    if flags.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=run.schedule.lr, momentum=flags.sgd_momentum, foreach=False)
    return torch.optim.AdamW(groups, lr=run.schedule.lr, betas=(flags.adam_beta1, flags.adam_beta2),
                             eps=flags.adam_eps, foreach=False)


def reference_evaluation(weights: Weights, run: Run, batches: Sequence[Batch],
                         documents: Numbering = one_document) -> float:
    """Return the mean loss per valid token of several global batches, in nats, without dropout."""
    with torch.no_grad():
        sums, counts = zip(*(reference_loss(weights, run, tokens, labels, documents(tokens, number * len(tokens)))
                             for number, (tokens, labels) in enumerate(batches)))
    return float(sum(sums)) / sum(counts)


def reference_loss(weights: Weights, run: Run, tokens: Tensor, labels: Tensor,
                   documents: Tensor | None = None, drop: Drop = keep_all) -> tuple[Tensor, int]:
    """Return the loss of a whole batch.

    Args:
        weights: whole tensors by parameter name. Their floating-point type is the type of the computation.
        run: gives the model, and what documents change.
        tokens: ``[B, s]`` int64.
        labels: ``[B, s]`` int64, -100 where there is no loss.
        documents: number of each token's document, ``[B, s]``; default: each sequence is one document.
        drop: dropout, such as that of ``keyed_dropout``; default: no dropout.

    Returns:
        The sum of the losses of the valid tokens in nats, and their number.
    """
    numbers = torch.zeros_like(tokens) if documents is None else documents
    same = numbers.unsqueeze(2) == numbers.unsqueeze(1)  # [B, s, s]
    if not run.data.reset_attention_mask:
        same = torch.ones_like(same)
    positions = None
    if run.data.reset_position_ids:  # the number of earlier tokens in the same document
        positions = (numbers.unsqueeze(2) == numbers.unsqueeze(1)).tril(-1).sum(dim=2)
    logits = reference_logits(weights, run.model, tokens, positions, drop, same)  # [B, s, V]
    log_probabilities = logits - torch.logsumexp(logits, dim=-1, keepdim=True)
    valid = labels != -100
    picked = log_probabilities[valid].gather(-1, labels[valid].unsqueeze(-1))  # [valid, 1]
    return -picked.sum(), int(valid.sum())


def reference_logits(weights: Weights, model: Model, tokens: Tensor, positions: Tensor | None = None,
                     drop: Drop = keep_all, same: Tensor | None = None) -> Tensor:
    """Return the logits ``[B, s, V]`` of tokens ``[B, s]``.

    Args:
        same: whether two tokens are of one document and may see each other, bool ``[B, s, s]``; default: all may.
    """
    if positions is None:
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    x = weights["embedding.word.weight"][tokens]  # [B, s, h]
    if model.position_embedding_type == "learned_absolute":
        x = x + weights["embedding.position.weight"][positions]
    x = drop("embedding", x)
    for index in range(model.num_layers):
        seen = _seen(model, index, same, x.shape[1])
        x = reference_block(weights, f"layers.{index}", model, x, positions, drop, seen)
    x = _norm(weights, "final_norm", model, x)
    tied = not model.untie_embeddings_and_output_weights
    return x @ weights["embedding.word.weight" if tied else "output.weight"].T


def _seen(model: Model, layer: int, same: Tensor | None, length: int) -> Tensor | None:
    """Return which keys the queries of a layer may see, bool ``[B, n, s, s]``; None where all keys before them."""
    visible = visible_keys(model, layer, length)
    if same is None:
        return None if visible is None else visible.unsqueeze(0)
    same = same.unsqueeze(1)  # [B, 1, s, s]
    return same if visible is None else same & visible


def reference_block(weights: Weights, name: str, model: Model, x: Tensor, positions: Tensor,
                    drop: Drop = keep_all, same: Tensor | None = None) -> Tensor:
    """Return the output of the layer ``name`` for the input x, both ``[B, s, h]``."""
    layer = name.removeprefix("layers.")
    normed = _norm(weights, f"{name}.input_norm", model, x)
    branch = _attention(weights, f"{name}.attention", model, normed, positions, partial(drop, f"{layer}/attention"),
                        same)
    x = x + drop(f"{layer}/attention-output", branch)
    branch = _mlp(weights, f"{name}.mlp", model, _norm(weights, f"{name}.post_attention_norm", model, x))
    return x + drop(f"{layer}/mlp-output", branch)


def _linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    y = x @ weights[f"{name}.weight"].T
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def _norm(weights: Weights, name: str, model: Model, x: Tensor) -> Tensor:
    weight = weights[f"{name}.weight"] + (1 if model.apply_layernorm_1p else 0)
    if model.normalization == "LayerNorm":
        x = x - x.mean(dim=-1, keepdim=True)
    x = x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + model.norm_epsilon) * weight
    return x + weights[f"{name}.bias"] if f"{name}.bias" in weights else x


def _attention(weights: Weights, name: str, model: Model, x: Tensor, positions: Tensor, drop: Drop,
               same: Tensor | None) -> Tensor:
    """Return causal attention, ``[B, s, h]`` to ``[B, s, h]``. Query head i uses key/value head ``i * g // n``."""
    n, g, d = model.num_attention_heads, model.num_query_groups, model.kv_channels
    batch, length, _ = x.shape
    q = _linear(weights, f"{name}.query", x).view(batch, length, n, d)
    k = _linear(weights, f"{name}.key", x).view(batch, length, g, d)
    v = _linear(weights, f"{name}.value", x).view(batch, length, g, d)
    if model.qk_layernorm:
        q, k = _norm(weights, f"{name}.query_norm", model, q), _norm(weights, f"{name}.key_norm", model, k)
    if model.position_embedding_type == "rope":
        q, k = _rotate(q, positions, model), _rotate(k, positions, model)
    hidden = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    if same is not None:
        hidden = hidden | ~same  # [B, n, s, s] or [B, 1, s, s]
    outputs = []
    for head in range(n):
        group = head * g // n
        scores = q[:, :, head] @ k[:, :, group].transpose(1, 2) / math.sqrt(d)  # [B, s, s]
        probabilities = torch.softmax(scores.masked_fill(hidden[:, head % hidden.shape[1]], -math.inf), dim=-1)
        outputs.append(drop(probabilities, head) @ v[:, :, group])  # [B, s, d]
    return _linear(weights, f"{name}.output", torch.cat(outputs, dim=-1))


def _rotate(x: Tensor, positions: Tensor, model: Model) -> Tensor:
    """Return x, ``[B, s, heads, d]``, with rotary embedding: each pair of channels is rotated by position x frequency.

    Only the first ``rotary_percent`` of the channels are rotated. Pair j is the channels (j, j + half), or (2j, 2j + 1)
    if ``rotary_interleaved``.
    """
    turned = int(x.shape[-1] * model.rotary_percent)
    angles = positions.double()[..., None] * rotary_frequencies(turned, model)  # [B, s, turned/2]
    length = _yarn_length(model)
    cos, sin = (length * part.to(x.dtype).unsqueeze(2) for part in (angles.cos(), angles.sin()))
    if model.rotary_interleaved:
        first, second = x[..., 0:turned:2], x[..., 1:turned:2]
    else:
        first, second = x[..., :turned // 2], x[..., turned // 2:turned]
    new_first, new_second = first * cos - second * sin, second * cos + first * sin
    if model.rotary_interleaved:
        rotated = torch.stack((new_first, new_second), dim=-1).flatten(-2)
    else:
        rotated = torch.cat((new_first, new_second), dim=-1)
    return torch.cat((rotated, x[..., turned:]), dim=-1)


def _yarn_length(model: Model) -> float:
    """Return how long YaRN makes a rotated pair: the scores of attention are multiplied by the square."""
    if model.rope_scaling_type != "yarn":
        return 1.0
    above, below = (1 + scale * 0.1 * math.log(model.rotary_scaling_factor)
                    for scale in (model.mscale, model.mscale_all_dim))
    return model.yarn_attention_factor or above / below


def rotary_frequencies(turned: int, model: Model) -> Tensor:
    """Return the frequency ``base^(-2j/turned)`` of each pair j of channels: ``[turned/2]`` fp64 radians per position.

    With Llama-3.1 scaling, a wavelength above 8192 tokens is multiplied by the factor, and one below 2048 is kept. In
    between the frequencies are interpolated by how many wavelengths fit into 8192 tokens (1 to 4).

    NTK-aware scaling divides the frequency of pair j by factor^(j / (number of pairs - 1)). YaRN divides it by the
    factor from that pair on whose wavelength is the original context / ``yarn_beta_slow``, keeps it up to the pair of
    the original context / ``yarn_beta_fast``, and interpolates in between by the number of the pair.

    Args:
        turned: number of channels that are rotated.
        model: gives the base and the scaling.
    """
    frequencies = []
    for pair in range(turned // 2):
        frequency = model.rotary_base ** (-2 * pair / turned)
        if model.rope_scaling_type == "ntk":
            frequency /= model.rotary_scaling_factor ** (pair / (turned / 2 - 1))
        if model.rope_scaling_type == "yarn":
            fast, slow = (math.log(model.original_max_position_embeddings / (2 * math.pi * beta), model.rotary_base)
                          * turned / 2 for beta in (model.yarn_beta_fast, model.yarn_beta_slow))
            if model.yarn_correction_range_round_to_int:
                fast, slow = math.floor(fast), math.ceil(slow)
            fast, slow = max(fast, 0), min(slow, turned - 1)
            keep = 1 - min(max((pair - fast) / (slow - fast if slow != fast else 0.001), 0.0), 1.0)
            frequency *= keep + (1 - keep) / model.rotary_scaling_factor
        if model.use_rope_scaling:
            turns = 8192 * frequency / (2 * math.pi)
            keep = min(max((turns - 1) / (4 - 1), 0.0), 1.0)
            frequency *= keep + (1 - keep) / model.rope_scaling_factor
        frequencies.append(frequency / model.rotary_seq_len_interpolation_factor)
    return torch.tensor(frequencies, dtype=torch.float64)


def _mlp(weights: Weights, name: str, model: Model, x: Tensor) -> Tensor:
    up = _linear(weights, f"{name}.up", x)
    if model.activation == "swiglu":
        gate = _linear(weights, f"{name}.gate", x)
        return _linear(weights, f"{name}.down", gate * torch.sigmoid(gate) * up)
    if model.activation == "gelu":
        active = 0.5 * up * (1 + torch.erf(up / math.sqrt(2)))
    elif model.activation == "openai_gelu":
        active = 0.5 * up * (1 + torch.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
    elif model.activation == "quick_gelu":
        active = up * torch.sigmoid(1.702 * up)
    elif model.activation == "squared_relu":
        active = torch.clamp(up, min=0) ** 2
    else:
        raise ValueError(f"no reference for the activation {model.activation!r}")
    return _linear(weights, f"{name}.down", active)


def weight_shapes(run: Run) -> dict[str, tuple[int, ...]]:
    """Return the whole shape of every parameter by name, without padding of the vocabulary."""
    model = run.model
    h, f, d = model.hidden_size, model.ffn_hidden_size, model.kv_channels
    n, g, vocabulary = model.num_attention_heads, model.num_query_groups, model.vocab_size
    shapes: dict[str, tuple[int, ...]] = {"embedding.word.weight": (vocabulary, h)}
    if model.position_embedding_type == "learned_absolute":
        shapes["embedding.position.weight"] = (model.max_position_embeddings, h)
    qkv_bias, bias = model.add_bias_linear or model.add_qkv_bias, model.add_bias_linear
    linears = [("attention.query", n * d, h, qkv_bias), ("attention.key", g * d, h, qkv_bias),
               ("attention.value", g * d, h, qkv_bias), ("attention.output", h, n * d, bias),
               ("mlp.up", f, h, bias), ("mlp.down", h, f, bias)]
    if model.activation == "swiglu":
        linears.append(("mlp.gate", f, h, bias))
    norms = [("final_norm", h)]
    for index in range(model.num_layers):
        for name, out, into, has_bias in linears:
            shapes[f"layers.{index}.{name}.weight"] = (out, into)
            if has_bias:
                shapes[f"layers.{index}.{name}.bias"] = (out,)
        norms += [(f"layers.{index}.input_norm", h), (f"layers.{index}.post_attention_norm", h)]
        if model.qk_layernorm:
            norms += [(f"layers.{index}.attention.query_norm", d), (f"layers.{index}.attention.key_norm", d)]
    for name, width in norms:
        shapes[f"{name}.weight"] = (width,)
        if model.normalization == "LayerNorm":
            shapes[f"{name}.bias"] = (width,)
    if model.untie_embeddings_and_output_weights:
        shapes["output.weight"] = (vocabulary, h)
    return shapes


def random_weights(run: Run, seed: int = 0, dtype: torch.dtype = torch.float64) -> Weights:
    """Return whole random weights by name. No bias is 0 and no norm weight is 1, so leaving one out has an effect."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in weight_shapes(run).items():
        value = torch.randn(shape, generator=generator, dtype=torch.float64) * (0.2 if len(shape) == 1 else 0.1)
        is_norm_weight = name.endswith("norm.weight")
        weights[name] = (value + (1 if is_norm_weight and not run.model.apply_layernorm_1p else 0)).to(dtype)
    return weights
