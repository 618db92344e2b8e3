"""Data: token files, sample order, blends, batches, tokenizers. Knows no process groups."""
