"""What each rung of the ladder does."""
