"""What `nanguard explain` and `nanguard replay` do."""
