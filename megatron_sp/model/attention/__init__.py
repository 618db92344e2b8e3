"""Self-attention: the module, the cores that compute it on one rank, and the block kernels of a ring."""
