"""The processes of a server on this machine, read from /proc: no privilege, no restart, nothing asked of the server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from sglang_eagle3_plugin.errors import UserError
from sglang_eagle3_plugin.procfs import PROC, everyone


def tree(pid: int) -> list[int]:
    """The process, its descendants, and those ancestors that are SGLang's own, in ascending order.

    Raises:
        UserError: there is no such process.
    """
    parents = {child: stat.parent for child, stat in everyone()}
    if pid not in parents:
        raise UserError(f"there is no process {pid} on this machine; give the pid of a running SGLang server")
    top = pid
    while (parent := parents.get(top)) in parents and parent is not None and "sglang" in cmdline(parent):
        top = parent
    found = {top}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found)


def role(pid: int) -> str:
    """What a process of an SGLang server is: ``scheduler TP0``, ``detokenizer``, ``launcher``, from its title or command line."""
    text = cmdline(pid)
    # SGLang names its processes by setproctitle: sglang::scheduler_TP0, sglang::detokenizer, ...
    title = re.match(r"sglang::(\w+)", text)
    if title:
        return title.group(1).replace("_", " ").strip()
    if "sglang.launch_server" in text or re.search(r"\bsglang\b.*\bserve\b", text):
        return "launcher"
    if "--multiprocessing-fork" in text:
        return "worker"
    return "python"


def cmdline(pid: int) -> str:
    """The command line of a process, blanks between its words; empty where it cannot be read."""
    try:
        return (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def environment(pid: int) -> dict[str, str]:
    """The environment a process of this user was started with; empty where it cannot be read."""
    try:
        words = (PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    return dict(word.decode(errors="replace").partition("=")[::2] for word in words if b"=" in word)


def listening_on(url: str) -> int:
    """The pid of this user's process that listens on the URL's port.

    Raises:
        UserError: the URL has no port, or none of this user's processes listens there.
    """
    try:
        parts = urlsplit(url if "//" in url else f"//{url}")
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:
        port = None
    if port is None:
        raise UserError(f"{url!r} names no port; give the server's address like http://127.0.0.1:30000")
    sockets = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    for pid, _ in everyone():
        try:
            if any(str(fd.readlink()) in sockets for fd in (PROC / str(pid) / "fd").iterdir()):
                return pid
        except OSError:
            continue
    raise UserError(
        f"no process of yours on this machine listens on port {port}; run this where the server runs, as its user, or give --pid"
    )


def _listening_inodes(port: int) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        try:
            lines = (PROC / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            words = line.split()
            if words[3] == "0A" and int(words[1].rpartition(":")[2], 16) == port:
                yield words[9]
