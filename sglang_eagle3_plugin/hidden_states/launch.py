"""An SGLang server of this environment that dumps, for as long as a block runs."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from sglang_eagle3_plugin.errors import UserError
from sglang_eagle3_plugin.rig import process
from sglang_eagle3_plugin.server.address import parse
from sglang_eagle3_plugin.server.wait import Snapshot, wait

_OURS = ("--model-path", "--model", "--host", "--port", "--disable-radix-cache")
"""Flags that are set here."""


@contextlib.contextmanager
def serving(
    target: str,
    dump: Path,
    flags: Sequence[str] = (),
    *,
    timeout_s: float = 1800.0,
    on_look: Callable[[Snapshot], None] = lambda _: None,
) -> Iterator[str]:
    """Start ``sglang.launch_server`` for a target, wait until it is ready, and end it with the block; yields its URL.

    It listens on 127.0.0.1 alone, keeps no prefixes, and waits for the disk rather than drop samples, unless EAGLE3_DUMP_WHEN_FULL
    says so. The other EAGLE3_DUMP_ variables are those of this process. A server killed amid a shard loses nothing acknowledged.

    Args:
        target: directory or name of the target.
        dump: directory, made if need be.
        flags: further ones of ``sglang.launch_server``.
        timeout_s: it may take so long to start.
        on_look: called several times a second while it starts.

    Raises:
        UserError: there is no SGLang here, a flag is one that is set here, or the server did not start; the message says why.
    """
    if importlib.util.find_spec("sglang") is None:
        raise UserError("SGLang is not installed in this environment; run this where it is, or start a server and give --url")
    taken = [flag for flag in flags if flag.partition("=")[0] in _OURS]
    if taken:
        raise UserError(f"{taken[0]} is set by `extract --target` itself; leave it out, or start the server and give --url")
    try:
        dump.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"the dump {dump} cannot be made ({error.strerror}); give --dump a directory that can") from error
    port = process.free_port()
    argv = [sys.executable, "-m", "sglang.launch_server", "--model-path", target, "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--disable-radix-cache", *flags]
    variables = {"EAGLE3_DUMP_WHEN_FULL": "wait", **os.environ, "EAGLE3_DUMP_DIR": str(dump.absolute())}
    log = Path(tempfile.mkdtemp(prefix="eagle3-extract-"), "server.log")
    address = parse(f"127.0.0.1:{port}")
    with process.supervised(argv, variables, log) as child:
        result = wait(address, pid=child.pid, log=log, timeout_s=timeout_s, on_look=on_look)
        if result.state != "ready":
            raise UserError(f"the server for {target} did not start: {result.reason} (its log: {log})")
        yield address.url
    log.unlink()
    log.parent.rmdir()
