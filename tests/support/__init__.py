"""What several tests share: the runtime's environment, and pytest run inside it."""
