"""Checkpoints: complete or absent, independent of the layout; see docs/checkpoints.md."""
