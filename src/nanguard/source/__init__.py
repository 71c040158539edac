"""The user's program: the lines and modules that are running."""
