"""``nanguard doctor``: checks a machine and a program without running the program."""
