"""Training state kept to come back to."""
