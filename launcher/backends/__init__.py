"""Where a run happens: the Machine protocol and its implementations."""
