"""``nanguard doctor``: what to change about a machine and a program, found out by looking, never by running it."""
