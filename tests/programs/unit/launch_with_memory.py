"""`launch` on a computer with a terabyte of free memory, however little is free here."""

import sys

from launcher.cli.main import main
from runtime import fitness

if __name__ == "__main__":
    fitness.memory_bytes = lambda: 10**12
    sys.exit(main(sys.argv[1:]))
