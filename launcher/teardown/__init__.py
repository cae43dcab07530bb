"""What keeps a run from leaving anything behind: records, guardian, minder, leases."""
