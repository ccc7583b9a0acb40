"""The command group, and the one place where an error becomes an exit code.

Exit codes: 0 fine, 1 a finding, 2 bad input or a refusal of the operating system (one sentence on stderr, no traceback), 130
interrupted, 129 and 143 ended by SIGHUP and SIGTERM, 141 the reader of a pipe left before all was said.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import click

from sglang_eagle3_plugin import __version__
from sglang_eagle3_plugin.cli.untrusted import visible
from sglang_eagle3_plugin.errors import UserError

# name -> (module under cli, one line of help). A command's module is imported only when it is asked for.
COMMANDS: dict[str, str] = {
    "demo": "Real SGLang without a GPU: fails unpatched, works with the plugin.",
    "status": "What is patched, skipped, and why: here, or in a running server.",
    "wiring": "Which boundaries each SGLang release captures for a draft, and which it should.",
    "models": "Every model class of an SGLang release: native, by the plugin and how, or not and why.",
    "doctor": "Find a wiring fault in a target, draft and flags before the model loads.",
    "debug": "See what the draft is fed in a running server: on, off, status, tail.",
    "wait": "Wait until a server is ready; stop at once, with the reason, when it failed.",
    "hidden-states": "Dump a live server, export to trainers, compare wirings, score a draft.",
    "accept": "How many draft tokens a running server accepts, and whether that is right.",
    "patches": "Source patches for each SGLang release: list, show, check, apply, revert, export.",
    "bench": "Baseline against EAGLE-3 on the same prompts; a sweep of draft settings.",
    "compat": "The matrix over SGLang releases: show, survey, run, probe.",
}


_INTERRUPTED = 128 + signal.SIGINT
_LONGEST = 1200
_REMEDY = "mend that and run it again"
_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space, or write elsewhere, and run it again"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "give a path that you may use, or ask for the right to"),
    **dict.fromkeys(
        (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EEXIST), "give another path"
    ),
}
"""What to do, by ``errno``."""


class _ReaderLeftError(Exception):
    pass


@contextlib.contextmanager
def _broken_pipe_kept_from_click() -> Iterator[None]:
    """click and rich turn a broken pipe into exit status 1, which here means a finding."""
    try:
        yield
    except BrokenPipeError as error:
        raise _ReaderLeftError from error
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):
            raise _ReaderLeftError from ended
        raise


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"sglang_eagle3_plugin.cli.{cmd_name.replace('-', '_')}")
        command: click.Command = module.command
        return command

    def make_context(self, *args: Any, **more: Any) -> click.Context:
        with _broken_pipe_kept_from_click():  # --help is written while options are parsed
            return super().make_context(*args, **more)

    def invoke(self, ctx: click.Context) -> Any:
        with _broken_pipe_kept_from_click():
            return super().invoke(ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # The help page is written from the table, so that showing it imports no command.
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="sglang-eagle3")
def group() -> None:
    """EAGLE-3 speculative decoding on SGLang: delegation, wiring, evidence."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit; see the module's docstring for the codes."""
    _replace_what_cannot_be_written()
    with _ended_in_order():
        code = _run(argv)
    sys.exit(code if isinstance(code, int) else 0)


def _run(argv: Sequence[str] | None) -> Any:
    try:
        return group.main(args=None if argv is None else list(argv), standalone_mode=False)
    except UserError as error:
        return _complain(str(error))
    except click.ClickException as error:
        return _complain(f"{error.format_message()} (see --help)")
    except (click.Abort, KeyboardInterrupt):
        return _INTERRUPTED
    except _ReaderLeftError:
        return _reader_left()
    except OSError as error:
        return _refused(error)


@contextlib.contextmanager
def _ended_in_order() -> Iterator[None]:
    """Let SIGTERM (a job's time is over) and SIGHUP (the terminal has gone) end a command as Ctrl-C does: with what it started."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:  # who runs us with nohup means it
                before[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _replace_what_cannot_be_written() -> None:
    """Have what the terminal's encoding lacks, or what is no character (an odd byte of a file's name), written as an escape."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _reader_left() -> int:
    """`sglang-eagle3 ... | head`: no fault, but not all was said. What a program that the signal ends leaves in a shell's `$?`."""
    _write_no_more()
    return 128 + signal.SIGPIPE


def _refused(error: OSError) -> int:
    """A disk that is full, a place where we may not write, a path that leads nowhere: whatever no command knew better."""
    where = ": ".join(os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, (str, bytes)))
    code = _complain(f"{where + ': ' if where else ''}{error.strerror or error}; {_REMEDIES.get(error.errno or 0, _REMEDY)}")
    if not where:  # it may have been stdout itself, which the interpreter would try to flush again
        _write_no_more()
    return code


def _write_no_more() -> None:
    """Keep the interpreter from complaining, at exit, of what it can't flush."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _complain(sentence: str) -> int:
    sentence = visible(" ".join(sentence.split()))
    if len(sentence) > _LONGEST:  # a path of thousands of characters, as a rule
        sentence = f"{sentence[: _LONGEST // 2]} ... {sentence[-_LONGEST // 2 :]}"
    with contextlib.suppress(OSError):  # nobody to tell is no reason for another exit status
        click.echo(f"sglang-eagle3: {sentence}", err=True)
    return 2
