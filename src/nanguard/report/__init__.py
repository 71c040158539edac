"""What people look at: the report, and the data behind ``nanguard watch``."""
