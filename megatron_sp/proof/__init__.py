"""Proof that a layout computes what one process computes: a plain model, and the comparison with it."""
