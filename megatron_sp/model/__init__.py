"""The decoder: GPT and Llama style blocks, attention cores, loss, initialisation."""
