"""The command `sdcontrol`: one function per command, one line in `_COMMANDS`.

    exit code 0    done
              1    it failed while running, or some prompt was refused
              2    it was asked for something that cannot be: usage, settings, files, models
              130  interrupted; what was finished is kept

Knows commands and exit codes; what a command does stands in its own module. Importing this loads
neither torch nor transformers.
"""

import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress

from sdcontrol.cli.ab import add_ab
from sdcontrol.cli.advise import add_advise
from sdcontrol.cli.command import (
    Parser,
    escape_what_encodings_lack,
    exit_code,
    logging_to_stderr,
    message_of,
    new_parser,
    open_missing_streams,
)
from sdcontrol.cli.generate import add_generate
from sdcontrol.cli.inspect import add_inspect
from sdcontrol.cli.profile import add_profile
from sdcontrol.cli.record import add_record
from sdcontrol.cli.replay import add_replay
from sdcontrol.cli.train import add_train
from sdcontrol.extras import missing
from sdcontrol.interrupts import raise_interrupt

__all__ = ["main"]

_COMMANDS = (
    add_ab,
    add_generate,
    add_record,
    add_replay,
    add_inspect,
    add_train,
    add_advise,
    add_profile,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` (without the program's name) asks for; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    open_missing_streams()
    escape_what_encodings_lack()
    is_debugging = "--debug" in arguments
    try:
        return _run(arguments, is_debugging)
    except KeyboardInterrupt:
        print("sdcontrol: interrupted", file=sys.stderr)
        return 130


def _run(arguments: Sequence[str], is_debugging: bool) -> int:
    try:
        with logging_to_stderr(is_debugging):
            options = _parser().parse_args(arguments)
            code: int = options.run(options)
            sys.stdout.flush()
            return code
    except BrokenPipeError:  # whoever read the output has enough; let nobody flush into the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        raise_interrupt(error)
        if is_debugging:
            traceback.print_exc()
        told = missing(error) or error
        with suppress(OSError):  # nobody to tell
            print(f"sdcontrol: error: {message_of(told)}", file=sys.stderr)
        return exit_code(told)


def _parser() -> Parser:
    parser, commands = new_parser()
    for add in _COMMANDS:
        add(commands)
    return parser
