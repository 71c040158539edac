"""``nanguard demo``: a small GPT that dies in a plain loop and finishes under the guard."""
