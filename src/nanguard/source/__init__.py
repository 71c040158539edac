"""The program as it is written and as it runs: lines of frames, modules at work."""
