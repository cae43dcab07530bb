"""What was asked: every setting with where it came from, whether it can work, what it would cost."""
