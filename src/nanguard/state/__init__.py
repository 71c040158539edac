"""What a training run consists of, and how it is saved and put back."""
