"""Checkpoints: complete or absent, independent of the layout; see docs/reference/checkpoints.md."""
