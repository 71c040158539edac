"""Incidents on disk: writing and reading them."""
