"""What a run reports: log lines, metrics files, trackers, timers, profiles, peak memory and peak FLOP/s."""
