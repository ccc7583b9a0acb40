"""The command group, and the one place where an error becomes an exit code.

Exit codes: 0 fine, 1 a finding, 2 bad input (one sentence on stderr, no traceback), 130 interrupted.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Sequence

import click

from sglang_eagle3_plugin import __version__
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


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"sglang_eagle3_plugin.cli.{cmd_name.replace('-', '_')}")
        command: click.Command = module.command
        return command

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
    try:
        code = group.main(args=None if argv is None else list(argv), standalone_mode=False)
    except UserError as error:
        code = _complain(str(error))
    except click.ClickException as error:
        code = _complain(f"{error.format_message()} (see --help)")
    except (click.Abort, KeyboardInterrupt):
        code = 128 + signal.SIGINT
    except BrokenPipeError:
        # `sglang-eagle3 ... | head`: the reader left, which is no fault. Keep the interpreter from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code if isinstance(code, int) else 0)


def _complain(sentence: str) -> int:
    click.echo(f"sglang-eagle3: {' '.join(sentence.split())}", err=True)
    return 2
