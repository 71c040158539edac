"""The command line."""

from nanguard.cli.commands import app, main

__all__ = ["app", "main"]
