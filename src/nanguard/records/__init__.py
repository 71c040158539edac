"""What is known about a step, as frozen records, and how they read."""
