"""Patterns of sparse attention: which blocks of earlier tokens a block of tokens attends to. Needs no torch."""
