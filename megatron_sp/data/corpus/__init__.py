"""From files of text to token sets: find and read the input, tokenize it with many processes, write the output."""
