"""``nanguard demo``: a small GPT that fails in a plain loop and finishes under the guard."""
