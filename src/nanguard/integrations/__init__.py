"""nanguard inside the trainers that people use. Each framework has its own module, and is imported only by it."""
