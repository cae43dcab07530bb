"""The first process of a machine once it is up: takes in what lost its parent. Standard library only."""

import os
import signal


def main() -> None:
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            signal.pause()


if __name__ == "__main__":
    main()
