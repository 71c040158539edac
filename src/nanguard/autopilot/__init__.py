"""Guards a program without changes to it: ``nanguard run script.py``, and ``nanguard.install()``."""
