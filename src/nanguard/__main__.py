"""``python -m nanguard``."""

from nanguard.cli.commands import main

main()
