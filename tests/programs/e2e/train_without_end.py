"""A user's program that trains, step after step, until it is ended."""

from __future__ import annotations

from launcher.client import connect
from tests.programs.e2e.train_and_wait import train


def main() -> None:
    run = connect()
    while True:
        train(run)


if __name__ == "__main__":
    main()
