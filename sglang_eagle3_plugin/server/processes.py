"""The processes of a server on this machine, read from /proc: no privilege, no restart, nothing asked of the server."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sglang_eagle3_plugin.errors import UserError
from sglang_eagle3_plugin.interpreter import Program, program
from sglang_eagle3_plugin.procfs import PROC, everyone
from sglang_eagle3_plugin.server import address

_Ip = ipaddress.IPv4Address | ipaddress.IPv6Address
_Found = tuple[socket.AddressFamily, socket.SocketKind, int, str, Any]
_EVERYWHERE: dict[int, tuple[_Ip, ...]] = {
    4: (ipaddress.IPv4Address(0), ipaddress.IPv6Address(0)),  # a socket for all of IPv6 takes IPv4 too, as a rule
    6: (ipaddress.IPv6Address(0),),
}


def tree(pid: int) -> list[int]:
    """The process, its descendants, and those ancestors that are SGLang's own, in ascending order.

    Raises:
        UserError: there is no such process.
    """
    parents = {child: stat.parent for child, stat in everyone()}
    if pid not in parents:
        raise UserError(f"there is no process {pid} on this machine; give the pid of a running SGLang server")
    top = pid
    # A shell, a supervisor or a test may have started several servers, and names SGLang too: no climbing into those.
    while (parent := parents.get(top)) in parents and parent is not None and holds_a_server(parent):
        top = parent
    found = {top}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found)


def role(pid: int) -> str:
    """What a process of an SGLang server is: ``scheduler TP0``, ``detokenizer``, ``launcher``, from its title or command line."""
    words = _words(pid)
    # SGLang names its processes by setproctitle: sglang::scheduler_TP0, sglang::detokenizer, ...
    title = re.match(r"sglang::(\w+)", words[0]) if words else None
    if title:
        return title.group(1).replace("_", " ").strip()
    if _launches(words):
        return "launcher"
    return "worker" if "--multiprocessing-fork" in words else "python"


def is_sglang(pid: int) -> bool:
    """Whether a process is SGLang's own: a launcher, or one that has its title by now."""
    return role(pid) not in _STRANGERS


_STRANGERS = ("python", "worker")
"""Roles of processes that are not SGLang's, or can't be told from others yet."""


def _runs(words: list[str]) -> Program | None:
    """What a Python process runs, by its own words: the one after ``bash -c`` may hold the command lines of several servers."""
    return program(words) if words and words[0].rpartition("/")[2].startswith("python") else None


def _launches(words: list[str]) -> bool:
    """Whether a command line is that of ``python -m sglang.launch_server`` or ``sglang serve`` itself."""
    run = _runs(words)
    return run is not None and run.server_flags is not None


def holds_a_server(pid: int) -> bool:
    """Whether a process is the main one of a server: SGLang's own, or a module of SGLang or around it, as ``dynamo.sglang`` is."""
    run = _runs(_words(pid))
    return is_sglang(pid) or (run is not None and "sglang" in run.module.split("."))


def _words(pid: int) -> list[str]:
    """The words of a process's command line; empty where it cannot be read."""
    try:
        return [word.decode(errors="replace") for word in (PROC / str(pid) / "cmdline").read_bytes().split(b"\0") if word]
    except OSError:
        return []


def environment(pid: int) -> dict[str, str]:
    """The environment a process of this user was started with; empty where it cannot be read."""
    try:
        words = (PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    return dict(word.decode(errors="replace").partition("=")[::2] for word in words if b"=" in word)


def owner(pid: int) -> int | None:
    """The user id of a process; None where there is none."""
    try:
        return (PROC / str(pid)).stat().st_uid
    except OSError:
        return None


def listening_on(url: str) -> int:
    """The pid of this user's process that listens at the URL, read as :func:`address.parse` does.

    Raises:
        UserError: it is no address or another machine's, or none of this user's processes listens there.
    """
    where = address.parse(url)
    port = where.port
    if not (where.is_loopback or _is_ours(where.host)):
        here = "name a server that runs here by 127.0.0.1 or --pid"
        raise UserError(f"{where.host} is no address of this machine; run this command there, or {here}")
    sockets = {f"socket:[{inode}]" for inode in _listening_inodes(where.host, port)}
    for pid in _holders(lambda fd: str(fd.readlink()) in sockets):
        return pid
    raise UserError(
        f"no process of yours on this machine listens on port {port}; run this where the server runs, as its user, or give --pid"
    )


def writers(path: Path) -> list[int]:
    """Those of this user's processes that have a file open for writing."""
    try:
        wanted = path.stat()
    except OSError:
        return []
    return list(_holders(lambda fd: os.path.samestat(fd.stat(), wanted) and _writes(fd)))


def _writes(fd: Path) -> bool:
    flags = re.search(r"^flags:\s*(\d+)", (fd.parent.parent / "fdinfo" / fd.name).read_text(), re.MULTILINE)
    return flags is not None and int(flags.group(1), 8) & os.O_ACCMODE != os.O_RDONLY


def _holders(holds: Callable[[Path], bool]) -> Iterator[int]:
    """Those of this user's processes that have a file open, in /proc/PID/fd, of which ``holds`` is true."""
    for pid, _ in everyone():
        try:
            if any(holds(fd) for fd in (PROC / str(pid) / "fd").iterdir()):
                yield pid
        except OSError:
            continue


def _is_ours(host: str) -> bool:
    """Whether a host is this machine: its own name, or an address that a socket can be bound to here."""
    if host.lower() == socket.gethostname().lower():
        return True
    found = _resolved(host)
    if not found:
        # A name of ours that nothing resolves: in a container, say.
        return host.lower() == socket.getfqdn().lower()
    for family, kind, protocol, _, place in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(place)
                return True
        except OSError:
            continue
    return False


def _listening_inodes(host: str, port: int) -> list[str]:
    """Of the sockets that listen on the port, those that a connection to the host would reach, else any."""
    at: dict[_Ip, list[str]] = {}
    for table in ("tcp", "tcp6"):
        try:
            lines = (PROC / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            words = line.split()
            digits, _, number = words[1].rpartition(":")
            if words[3] == "0A" and int(number, 16) == port:
                at.setdefault(_address(digits), []).append(words[9])
    for *_, place in _resolved(host):
        wanted = ipaddress.ip_address(str(place[0]).partition("%")[0])
        for own in (wanted, *_EVERYWHERE[wanted.version]):
            if own in at:
                return at[own]
    return [inode for inodes in at.values() for inode in inodes]


def _resolved(host: str) -> Sequence[_Found]:
    """Of a host, in the order in which a connection tries them; nothing where the name means nothing here."""
    try:
        return socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []


def _address(digits: str) -> _Ip:
    """Read an address of /proc/net/tcp: words of 32 bits, each in the machine's own order of bytes."""
    words = [int(digits[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(digits), 8)]
    found = ipaddress.ip_address(b"".join(words))
    return getattr(found, "ipv4_mapped", None) or found
