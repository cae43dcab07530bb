"""Providers' HTTPS APIs played on this computer: a proxy on 127.0.0.1 that is each of the hosts it knows.

What asks is unchanged: it is told of a proxy and of a CA, as behind a company's firewall. A host that is not
played is refused and remembered, so that nothing leaves this computer unseen.
Neighbours: `played_gcp.py`, `played_lambda.py` and `played_runpod.py` answer; `played_sky.py` is who asks.
"""

from __future__ import annotations

import datetime
import ipaddress
import json
import re
import ssl
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qsl, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

Json = dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """A request as it arrived. `body` is parsed where it is JSON."""

    host: str
    method: str
    path: str
    query: Mapping[str, str]
    body: Any

    def __str__(self) -> str:
        return f"{self.method} {self.path}"

    @property
    def text(self) -> str:
        """All of it but its host, for patterns."""
        return f"{self} {json.dumps(self.body)}"


@dataclass(frozen=True)
class Answer:
    """What goes back: JSON, or a text that is none."""

    body: Any
    status: int = 200


Play = Callable[[Asked], Answer]


@dataclass
class Played:
    """One provider: `hosts` are its names, `asked` is what it was asked, `faults` come before its answers.

    `listing` and `ending` are patterns of the requests that list machines and that end one.
    """

    hosts: ClassVar[tuple[str, ...]] = ()
    listing: ClassVar[str] = ""
    ending: ClassVar[str] = ""
    asked: list[Asked] = field(default_factory=list)
    faults: list[tuple[re.Pattern[str], Answer]] = field(default_factory=list)
    # What becomes of a machine that is ended: its last state, or none where it goes at once.
    ends_as: str | None = None

    def answer(self, asked: Asked) -> Answer:
        """Its own answer."""
        raise NotImplementedError

    def add_machine(self, cluster: str, state: str) -> str:
        """A machine of the cluster with this name there, in one of the provider's states: its id."""
        raise NotImplementedError

    def machines(self) -> list[str]:
        """The ids of what there is, in whatever state."""
        raise NotImplementedError

    def forget(self) -> None:
        """As new: nothing asked, nothing there, no faults."""
        self.asked.clear()
        self.faults.clear()
        self.ends_as = None

    def fail(self, pattern: str, answer: Answer) -> None:
        """From now on it answers so where `METHOD path body` fits."""
        self.faults.append((re.compile(pattern), answer))

    def count(self, pattern: str) -> int:
        """How often something that fits was asked."""
        return sum(1 for one in self.asked if re.search(pattern, one.text))

    def reply(self, asked: Asked) -> Answer:
        """What goes out."""
        self.asked.append(asked)
        for pattern, answer in self.faults:
            if pattern.search(asked.text):
                return answer
        return self.answer(asked)


class Proxy:
    """The proxy, at work until `close`. `ca` is the file of the certificate it is known by."""

    def __init__(self, folder: Path, played: list[Played]) -> None:
        hosts = {host: one for one in played for host in one.hosts}
        self.ca, key = _certificate(folder, sorted(hosts))
        self.refused: list[str] = []
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.ca, key)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(context, hosts, self.refused))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def environ(self) -> dict[str, str]:
        """What tells requests, httplib2 and google-auth of it."""
        proxies = dict.fromkeys(("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy"), self.url)
        return proxies | {"REQUESTS_CA_BUNDLE": str(self.ca), "HTTPLIB2_CA_CERTS": str(self.ca)}

    def close(self) -> None:
        """Nobody answers any more."""
        self._server.shutdown()
        self._server.server_close()


def _handler(
    context: ssl.SSLContext, hosts: Mapping[str, Played], refused: list[str]
) -> type[BaseHTTPRequestHandler]:
    one_at_a_time = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        host = ""

        def do_CONNECT(self) -> None:
            host = self.path.partition(":")[0]
            if host not in hosts:
                refused.append(host)
                self.send_error(502, "not played")
                return
            self.send_response(200)
            self.end_headers()
            self.connection = context.wrap_socket(self.connection, server_side=True)
            self.rfile = self.connection.makefile("rb")
            self.wfile = self.connection.makefile("wb", buffering=0)
            self.host, self.close_connection = host, False

        def do_GET(self) -> None:
            if not self.host:  # plain HTTP, such as a look for a cloud's metadata service
                refused.append(self.path)
                self.send_error(502, "not played")
                return
            where = urlsplit(self.path)
            raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            query = dict(parse_qsl(where.query, keep_blank_values=True))
            asked = Asked(self.host, self.command, where.path, query, _parsed(raw))
            with one_at_a_time:
                answer = hosts[self.host].reply(asked)
            is_text = isinstance(answer.body, str)
            body = answer.body.encode() if is_text else json.dumps(answer.body).encode()
            self.send_response(answer.status)
            self.send_header("Content-Type", "text/html" if is_text else "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_PUT = do_DELETE = do_PATCH = do_GET

        def log_message(self, *words: object) -> None:
            """Says nothing."""

    return Handler


def _parsed(raw: bytes) -> Any:
    try:
        return json.loads(raw) if raw else None
    except ValueError:
        return raw.decode(errors="replace")


def _certificate(folder: Path, hosts: list[str]) -> tuple[Path, Path]:
    """A certificate for these hosts that is its own authority, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "played providers")])
    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    names: list[x509.GeneralName] = [x509.DNSName(host) for host in hosts]
    names.append(x509.IPAddress(ipaddress.ip_address("127.0.0.1")))
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - day)
        .not_valid_after(now + day)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    ca, private = folder / "played-ca.pem", folder / "played-key.pem"
    ca.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return ca, private
