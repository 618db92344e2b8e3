"""Who holds what: ranks, tokens, heads, layers, shards and batches. Pure arithmetic without torch.

The checks of the command line, the memory plan, the data readers and the model all ask these modules, so that each
rule about ownership exists once.
"""
