"""Values that the rooms pass around: settings, a plan, the clouds, the calls of a machine. Nothing here does
anything."""
