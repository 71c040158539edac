"""What to do about a bad step: rungs, the decision, recipes. Pure functions of records."""
