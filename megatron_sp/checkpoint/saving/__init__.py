"""Save checkpoints: decide who writes what, copy it aside, write it, and delete old checkpoints."""
