"""``python -m nanguard``."""

from nanguard.cli import app

app(prog_name="nanguard")
