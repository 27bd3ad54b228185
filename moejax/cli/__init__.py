"""The `moejax` command. `_main.py` dispatches; one file per subcommand adds its parser and runs."""

from moejax.cli._main import main as main


__all__ = ["main"]
