"""Bad steps on disk."""
