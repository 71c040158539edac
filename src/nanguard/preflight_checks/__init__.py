"""Leans on a model before a run, and lists what breaks and what nearly does."""
