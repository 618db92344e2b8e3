"""The command line: which flags exist, how other systems spell them, and how their words become values."""
