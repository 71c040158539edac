"""Copies of the training state: in device memory, in host memory, on disk."""
