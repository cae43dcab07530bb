"""The first process of a machine once it is up: takes in what lost its parent, and ends at a shutdown.

Standard library only.
"""

import os
import signal


def main() -> None:
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGUSR1, lambda *_: os._exit(0))  # a shutdown from within
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            signal.pause()


if __name__ == "__main__":
    main()
