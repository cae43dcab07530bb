"""The gateway's process: the only endpoint of the runtime."""
