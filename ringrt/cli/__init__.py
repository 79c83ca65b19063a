"""The `ringrt` command. What a command needs is imported when it runs, so that `--help` is
quick and works with none of the extras installed."""

from ringrt.cli.main import main

__all__ = ["main"]
