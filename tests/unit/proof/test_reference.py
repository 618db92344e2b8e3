"""The reference model against Hugging Face's GPT-2 and Llama, so that it is not only equal to ourselves."""

from __future__ import annotations

import torch

from megatron_sp.config.schema import Data, Model, Run
from megatron_sp.proof.reference import (
    Weights,
    random_weights,
    reference_logits,
    reference_loss,
    rotary_frequencies,
    weight_shapes,
)

TOKENS = torch.randint(0, 97, (2, 24), generator=torch.Generator().manual_seed(1))


def _run(**model: object) -> Run:
    base = dict(num_layers=2, hidden_size=48, num_attention_heads=6, num_query_groups=6, kv_channels=8,
                ffn_hidden_size=80, max_position_embeddings=24, vocab_size=97, norm_epsilon=1e-5)
    return Run(model=Model(**(base | model)), data=Data(seq_length=24))  # type: ignore[arg-type]


def _llama_names(weights: Weights) -> Weights:
    names = {"embedding.word": "model.embed_tokens", "final_norm": "model.norm", "output": "lm_head"}
    inner = {"input_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm",
             "attention.query": "self_attn.q_proj", "attention.key": "self_attn.k_proj",
             "attention.value": "self_attn.v_proj", "attention.output": "self_attn.o_proj",
             "mlp.up": "mlp.up_proj", "mlp.gate": "mlp.gate_proj", "mlp.down": "mlp.down_proj"}
    for layer in range(2):
        names |= {f"layers.{layer}.{ours}": f"model.layers.{layer}.{theirs}" for ours, theirs in inner.items()}
    return {f"{names[name.removesuffix('.weight')]}.weight": value for name, value in weights.items()}


def test_equals_llama() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    run = _run(num_query_groups=2, position_embedding_type="rope", normalization="RMSNorm", activation="swiglu",
               add_bias_linear=False, untie_embeddings_and_output_weights=True, use_rope_scaling=True,
               rope_scaling_factor=8.0, rotary_base=500000.0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, head_dim=8, rms_norm_eps=1e-5, tie_word_embeddings=False, attn_implementation="eager",
        rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 8192})
    theirs = LlamaForCausalLM(config).double()
    weights = random_weights(run)
    theirs.load_state_dict(_llama_names(weights))
    expected = theirs(TOKENS).logits
    torch.testing.assert_close(reference_logits(weights, run.model, TOKENS), expected, rtol=1e-5, atol=1e-5)


def test_equals_gpt2() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    run = _run(ffn_hidden_size=192, activation="openai_gelu")
    theirs = GPT2LMHeadModel(GPT2Config(
        vocab_size=97, n_positions=24, n_embd=48, n_layer=2, n_head=6, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        attn_implementation="eager")).double()
    weights = random_weights(run)
    state = {"transformer.wte.weight": weights["embedding.word.weight"],
             "transformer.wpe.weight": weights["embedding.position.weight"],
             "lm_head.weight": weights["embedding.word.weight"]}
    inner = {"input_norm": "ln_1", "post_attention_norm": "ln_2", "attention.output": "attn.c_proj",
             "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
    for kind in ("weight", "bias"):
        state[f"transformer.ln_f.{kind}"] = weights[f"final_norm.{kind}"]
        for layer in range(2):
            for ours, name in inner.items():  # GPT-2 stores linear weights [in, out]
                state[f"transformer.h.{layer}.{name}.{kind}"] = weights[f"layers.{layer}.{ours}.{kind}"].t()
            qkv = [weights[f"layers.{layer}.attention.{part}.{kind}"] for part in ("query", "key", "value")]
            state[f"transformer.h.{layer}.attn.c_attn.{kind}"] = torch.cat(qkv).t()
    theirs.load_state_dict(state)
    torch.testing.assert_close(reference_logits(weights, run.model, TOKENS), theirs(TOKENS).logits)


def test_loss_sums_only_valid_tokens() -> None:
    run = _run()
    weights = random_weights(run)
    labels = torch.roll(TOKENS, -1, dims=1)
    labels[:, -1] = -100
    labels[0, 3:9] = -100
    total, count = reference_loss(weights, run, TOKENS, labels)
    logits = reference_logits(weights, run.model, TOKENS)
    torch.testing.assert_close(total, torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"))
    assert count == 2 * 24 - 2 - 6


def test_rotary_variants() -> None:
    """Partial and interleaved rotation keep lengths and depend only on the distance of two positions."""
    from megatron_sp.proof.reference import _rotate

    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 1, 16, dtype=torch.float64, generator=generator) for _ in range(2))
    for interleaved in (False, True):
        model = _run(rotary_percent=0.5, rotary_interleaved=interleaved, kv_channels=16).model
        at = {p: torch.tensor([[p]]) for p in (0, 3, 5, 8)}
        near = (_rotate(q, at[3], model) * _rotate(k, at[0], model)).sum()
        far = (_rotate(q, at[8], model) * _rotate(k, at[5], model)).sum()
        torch.testing.assert_close(near, far)
        assert not torch.allclose(near, (q * k).sum())
        assert torch.equal(_rotate(q, at[5], model)[..., 8:], q[..., 8:])
    stretched = _run(rotary_seq_len_interpolation_factor=4.0).model
    assert torch.equal(rotary_frequencies(8, stretched) * 4, rotary_frequencies(8, _run().model))


def test_names_cover_every_part() -> None:
    shapes = weight_shapes(_run(activation="swiglu", qk_layernorm=True))
    assert shapes["layers.1.mlp.gate.bias"] == (80,)
    assert shapes["layers.0.attention.query_norm.weight"] == (8,)
    assert "output.weight" not in shapes
