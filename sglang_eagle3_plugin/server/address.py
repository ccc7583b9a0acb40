"""A server's address as people write it, and the HTTP client for it."""

from __future__ import annotations

import ipaddress
import os
import ssl
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies_environment, proxy_bypass

import httpx

from sglang_eagle3_plugin.errors import UserError

DEFAULT_PORT = 30000
"""SGLang's own default (``--port`` in ``server_args.py``)."""


@dataclass(frozen=True)
class Address:
    """Where a server answers."""

    scheme: str
    host: str
    """Without the brackets of an IPv6 address."""
    port: int
    path: str
    """The prefix a proxy may serve it under; no slash at its end."""

    @property
    def url(self) -> str:
        """The address to put a path of the server behind."""
        return f"{self.scheme}://{self.at}{self.path}"

    @property
    def at(self) -> str:
        """Host and port."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether it is on this machine for certain."""
        if self.host.lower() == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host.partition("%")[0]).is_loopback
        except ValueError:
            return False


def parse(text: str) -> Address:
    """Read ``http://127.0.0.1:30000``, ``localhost:30000``, ``[::1]:30000``, ``https://host/prefix``.

    The addresses a server binds to mean all interfaces (0.0.0.0, ::) become the loopback address of their family.

    Raises:
        UserError: it is no address.
    """
    wanted = "give the server's address like http://127.0.0.1:30000"
    try:
        parts = urlsplit(text.strip() if "://" in text else f"http://{text.strip()}")
        port, host = parts.port, parts.hostname
    except ValueError as error:
        raise UserError(f"{text!r} is not an address ({error}); {wanted}") from error
    if parts.scheme not in ("http", "https"):
        raise UserError(f"{text!r} is neither http nor https; {wanted}")
    if not host or any(blank in host for blank in " \t\\"):
        raise UserError(f"{text!r} names no host; {wanted}")
    if parts.username or parts.query or parts.fragment:
        raise UserError(f"the address may hold no user, query or fragment; {wanted}")
    # Without a scheme a bare host means SGLang's port; a written http:// or https:// means that scheme's own.
    if port is None:
        port = {"http": 80, "https": 443}[parts.scheme] if "://" in text else DEFAULT_PORT
    if port == 0:
        raise UserError(f"{text!r} names port 0, where nothing listens; {wanted}")
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
    address = Address(parts.scheme, host, port, parts.path.rstrip("/"))
    try:  # what would fail only when a request is sent, and in whichever thread sends it
        httpx.URL(address.url)
        host.encode("idna")
    except (httpx.InvalidURL, UnicodeError) as error:
        raise UserError(f"{text!r} is not an address ({error}); {wanted}") from error
    return address


def client(address: Address, *, timeout_s: float, api_key: str | None = None) -> httpx.Client:
    """Return a client for the server.

    A proxy of the environment (``HTTP_PROXY``) is for the world outside: a loopback address is never sent through it. What the
    environment says is read by the standard library: httpx refuses some of what people write into ``NO_PROXY``.

    Raises:
        UserError: the key is no header, or the environment names a proxy or certificates that can't be used.
    """
    if api_key and not (api_key.isascii() and api_key.isprintable()):
        raise UserError("the API key holds characters that a request can't carry; check --api-key and SGLANG_API_KEY")
    proxies = getproxies_environment()
    outside = not (address.is_loopback or proxy_bypass(address.at, proxies) or proxy_bypass(address.host, proxies))
    proxy = (proxies.get(address.scheme) or proxies.get("all")) if outside else None
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)  # `bench` decides how many are under way
    verify = _certificates() if address.scheme == "https" else True
    try:
        through = None
        if proxy:
            named = httpx.Proxy(proxy if "://" in proxy else f"http://{proxy}")
            through = {"all://": httpx.HTTPTransport(proxy=named, verify=verify, limits=limits)}
    except (ImportError, ValueError, httpx.InvalidURL) as error:
        variable = f"{address.scheme.upper()}_PROXY or ALL_PROXY"
        raise UserError(
            f"the proxy that {variable} names can't be used ({error}); mend it, or set NO_PROXY={address.host}"
        ) from error
    return httpx.Client(
        base_url=address.url,
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, 5.0)),
        limits=limits,
        mounts=through,
        verify=verify,
        trust_env=False,
    )


def _certificates() -> ssl.SSLContext | bool:
    """Those that ``SSL_CERT_FILE`` and ``SSL_CERT_DIR`` name, or httpx's own."""
    file, directory = os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR")
    if not (file or directory):
        return True
    try:
        return ssl.create_default_context(cafile=file, capath=directory)
    except OSError as error:
        named = " and ".join(f"{name}={value}" for name, value in (("SSL_CERT_FILE", file), ("SSL_CERT_DIR", directory)) if value)
        raise UserError(f"the certificates of {named} can't be read ({error}); mend or unset it") from error


def get_json(http: httpx.Client, *paths: str) -> dict[str, Any]:
    """Return the JSON object at the first of these paths that exists.

    Raises:
        UserError: nothing answers, the key is refused, or no path exists.
    """
    where = str(http.base_url).rstrip("/")
    for path in paths:
        try:
            answer = http.get(path)
        except httpx.HTTPError as error:
            raise UserError(
                f"no answer from {where} ({type(error).__name__}: {error}); is the server up and the port right?"
            ) from error
        if answer.status_code in (401, 403):
            raise UserError(f"{where} refuses the request ({answer.status_code}); give --api-key")
        if answer.status_code == 200:
            try:
                found = answer.json()
            except ValueError as error:
                raise UserError(f"{where}{path} answers something other than JSON; is this an SGLang server?") from error
            if isinstance(found, dict):
                return found
    raise UserError(f"{where} has none of {', '.join(paths)}; is this an SGLang server?")
