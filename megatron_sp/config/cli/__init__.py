"""The command line: which flags exist, how other systems spell them, and how arguments become values."""
