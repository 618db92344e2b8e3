"""What a run tells: log lines, metrics files, trackers, timers, profiles and device figures."""
