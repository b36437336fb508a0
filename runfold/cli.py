"""Shell: the `runfold` command, put together from runfold/commands (R69)."""

from __future__ import annotations

import io
import os
import sys

import typer
from typer.exceptions import TyperException

from . import __version__
from .commands import (
    bench,
    bridge,
    check,
    decide,
    dev,
    export,
    fleet,
    look,
    operate,
    purge,
    running,
    signals,
    talk,
    watch,
    work,
)
from .frame import UsageProblem, report, report_bug

app = typer.Typer(
    name="runfold",
    help="Durable AI-agent runs: a write cut off by a crash is never repeated, never guessed at.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
running.register(app)
decide.register(app)
look.register(app)
talk.register(app)
signals.register(app)
watch.register(app)
work.register(app)
fleet.register(app)
dev.register(app)
operate.register(app)
bench.register(app)
check.register(app)
export.register(app)
purge.register(app)
bridge.register(app)


@app.callback(invoke_without_command=True)
def _options(
    version: bool = typer.Option(False, "--version", help="Print the version.", is_eager=True),
) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def main() -> None:
    """Entry point: exit codes as in R69, one line on stderr for whatever goes wrong."""
    json = "--json" in sys.argv
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what the terminal can't show is escaped
            stream.reconfigure(errors="backslashreplace")
    if not __debug__:
        sys.exit(report(UsageProblem("python -O removes checks that safety rests on"), json))
    command = typer.main.get_command(app)
    try:
        code = command.main(args=sys.argv[1:], prog_name="runfold", standalone_mode=False)
    except TyperException as error:
        format_message = getattr(error, "format_message", None)
        message = str(format_message() if format_message else error)
        if type(error).__name__ == "NoArgsIsHelpError":
            print(message)
            sys.exit(2)
        first = " ".join(message.split())
        hint = "`runfold --help`, `runfold COMMAND --help`"
        sys.exit(report(UsageProblem(first, hint=hint), json))
    except (KeyboardInterrupt, typer.Abort):
        print("runfold: interrupted; the run can be taken up again", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        sys.exit(report_bug(error, json))
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
