"""The run log: writing it, reading it, following it."""
