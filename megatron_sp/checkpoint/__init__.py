"""Checkpoints, each of which is complete or absent and loads into any layout; see docs/reference/checkpoints.md."""
