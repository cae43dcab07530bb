"""The ground: errors, the log, units, locks, processes. Imports nothing of ours but the runtime's light
modules."""
