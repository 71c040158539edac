"""What is kept of a failing step on disk, and how it is read, explained and run again."""
