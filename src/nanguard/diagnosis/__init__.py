"""Where a non-finite value came from, why, and what to do about it."""
