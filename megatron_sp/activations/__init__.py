"""What happens to activations between forward and backward: recomputed, tiled or moved to host memory."""
