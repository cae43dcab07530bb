"""The gateway's process: the only door of the runtime."""
