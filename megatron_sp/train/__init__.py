"""Training: set-up, the loop, optimizer, schedules, what is logged."""
