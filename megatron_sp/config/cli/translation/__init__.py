"""Megatron's and DeepSpeed's spellings of flags, and what they mean here."""
