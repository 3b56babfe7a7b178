"""The application and its error boundary: every way a command can end becomes an exit code here."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

import hookscope
from hookscope.cli import commands, talk
from hookscope.cli.collecting import as_a_guest
from hookscope.cli.flags import with_groups
from hookscope.errors import ExitCode, HookscopeError

app = typer.Typer(
    name="hookscope",
    help="See inside PyTorch image models.",
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        talk.say(f"hookscope {hookscope.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_print_version, help="Show the version and exit."),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        talk.say(context.get_help())


for _command in commands.COMMANDS:
    app.command(_command.__name__)(with_groups(_command))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; prints errors, never raises one."""
    talk.open_streams()
    with as_a_guest(arguments is not None):
        return _code(list(sys.argv[1:] if arguments is None else arguments))


def _code(arguments: list[str]) -> int:
    debug = "--debug" in arguments
    try:
        code = _invoke(arguments)
        talk.finish()
    except BaseException as error:
        if debug and not isinstance(error, (SystemExit, KeyboardInterrupt)):
            import traceback

            traceback.print_exc()
        code = _ended(error)
    talk.finish()
    return code


def _invoke(arguments: list[str]) -> int:
    # Not `app(...)`: typer's own boundary turns Ctrl-C, a closed pipe and an EOFError into codes of its own.
    command = typer.main.get_command(app)
    try:
        with command.make_context("hookscope", arguments) as context:
            return int(command.invoke(context) or 0)
    except typer.Exit as done:
        return done.exit_code


def _ended(error: BaseException) -> int:
    if isinstance(error, HookscopeError):
        talk.complain("error", error.message, error.hint)
        return int(error.exit_code)
    if isinstance(error, MemoryError):
        talk.complain(
            "error", "the memory does not suffice", "a smaller --batch-size, --resize, or fewer layers"
        )
        return int(ExitCode.MODEL)
    if isinstance(error, (KeyboardInterrupt, typer.Abort)):
        talk.complain("error", "interrupted", " ".join(getattr(error, "__notes__", ())))
        return int(ExitCode.INTERRUPTED)
    if isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError):
        return int(ExitCode.OK)  # rich, while it prints a help text
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(ExitCode.BUG)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        talk.complain(
            "error", f"cannot write the results: {error.strerror}", "is the disk that takes them full?"
        )
        return int(ExitCode.OUTPUT)
    usage = _usage_message(error)
    if usage:
        talk.complain("error", *usage)
        return int(ExitCode.USAGE)
    what = " ".join(f"{type(error).__name__}: {error}".split())[:400]
    talk.complain("error", f"unexpected {what}", "this is a bug in hookscope: --debug shows where")
    return int(ExitCode.BUG)


def _usage_message(error: BaseException) -> tuple[str, str] | None:
    """What typer found wrong with the flags, and where to read about them."""
    describe: Callable[[], str] | None = getattr(error, "format_message", None)
    if describe is None:
        return None
    context: Any = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "hookscope"
    message = " ".join(describe().split())
    return message[:1].lower() + message[1:], f"{path} --help"
