"""megatron_sp: train language models on extremely long sequences."""

__version__ = "0.1.0"
