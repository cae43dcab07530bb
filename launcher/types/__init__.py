"""What the rooms hand each other: settings, a plan, the clouds, the calls of a machine. Nothing here does
anything."""
