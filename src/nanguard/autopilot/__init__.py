"""Guards a program that nobody changed: ``nanguard run script.py``, and ``nanguard.install()``."""
