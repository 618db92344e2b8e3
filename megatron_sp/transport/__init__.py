"""How bytes travel between the CPU ranks of one machine; the strategies in ``parallel/`` do not see it."""
