"""The guarded step for loops that nanguard does not own."""
