"""Prove that a layout computes what one process computes: a plain model, and the comparison of a training with it."""
