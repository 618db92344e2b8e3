"""The configuration: flags, checks and derived values. Imports no torch."""
