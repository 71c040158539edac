"""``python -m nanguard``."""

from nanguard.cli import main

main()
