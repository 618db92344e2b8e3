"""Make a run small enough to prove on a few processes, without changing which code paths it takes. Without torch."""
