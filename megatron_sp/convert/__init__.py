"""Read and write models of other systems: Hugging Face, Megatron-LM, Megatron-DeepSpeed."""
