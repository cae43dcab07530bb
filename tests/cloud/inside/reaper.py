"""The first process of a machine once it is up: takes in what lost its parent, and ends at a shutdown.

Standard library only.
"""

import os
import signal


def main() -> None:
    waited_for = {signal.SIGCHLD, signal.SIGUSR1}
    signal.pthread_sigmask(signal.SIG_BLOCK, waited_for)  # so none is lost that comes before it is waited for
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        except ChildProcessError:
            pass
        if signal.sigwait(waited_for) == signal.SIGUSR1:
            os._exit(0)  # a shutdown from within


if __name__ == "__main__":
    main()
