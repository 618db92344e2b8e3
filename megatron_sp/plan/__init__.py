"""What a run will need, from its configuration alone: pure arithmetic, no torch."""
