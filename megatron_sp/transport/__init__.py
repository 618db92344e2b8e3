"""How bytes travel between ranks: torch's collectives, or memory that the CPU ranks of one machine share."""
