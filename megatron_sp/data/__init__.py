"""Data: tokenizers, token files, the order of samples, blends of data sets, and batches. No process groups are used."""
