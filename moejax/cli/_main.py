"""The `moejax` command. Each subcommand adds its parser and runs on its arguments.

A user's mistake is one line on standard error and exit status 2.
"""

import argparse
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from moejax._checks import nearest
from moejax.cli import (
    _best,
    _capture,
    _doctor,
    _eval,
    _fidelity,
    _import,
    _list,
    _plot,
    _report,
    _run,
    _trace,
)


# In the order of --help: what one starts with, what comes after a sweep, data, this machine.
_COMMANDS = (
    *(_eval, _run, _best, _plot, _report),
    *(_list, _trace, _capture, _fidelity, _import, _doctor),
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    parser = _Parser(
        prog="moejax",
        description="Sweeps of Mixture-of-Experts inference on memory-centric hardware.",
        epilog="First: moejax eval --model gpt-oss-120b --system 4xb200-hbm-pim --batch 64 "
        "--context 2048 --policy all",
    )
    version = importlib.metadata.version("moejax")
    parser.add_argument("--version", action="version", version=f"moejax {version}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add_parser(commands)
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        chosen = commands.choices[options.command]
        flags = [flag for action in chosen._actions for flag in action.option_strings]
        hint = nearest(unknown[0].partition("=")[0], flags)
        chosen.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    try:
        status = options.run(options) or 0
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Whoever reads our output, such as `head`, had enough, and nothing is left to say to them.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OverflowError, OSError) as error:
        print(f"moejax {options.command}: {_one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"moejax {options.command}: interrupted", file=sys.stderr)
        return 130


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())
