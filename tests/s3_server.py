"""A real S3 server on loopback, and a proxy in front of it that fails, delays and refuses requests."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

import psutil

KEYS = {
    "AWS_ACCESS_KEY_ID": "AKIATESTTESTTESTTEST",
    "AWS_SECRET_ACCESS_KEY": "the-secret-key-of-the-tests",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


def environment(port: int) -> dict[str, str]:
    """Return what a process needs to use the server, or the proxy, at this port."""
    return {**KEYS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "NO_PROXY": "127.0.0.1"}


@contextlib.contextmanager
def s3_server(log: Path) -> Iterator[int]:
    """Inside, an S3 server without buckets listens at the port that is yielded."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with log.open("wb") as output:
        command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        server = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **KEYS})
    try:
        _await(port, server, log)
        yield port
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(timeout=5)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _await(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/moto-api/data.json", timeout=5).close()
            return
        except OSError:
            assert server.poll() is None and time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.05)


def make_bucket(port: int, name: str) -> None:
    request(port, "PUT", f"/{name}")


def request(port: int, method: str, path: str, body: bytes = b"") -> bytes:
    """Speak to the server without signing: it does not look."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(
            method, path, body, {"Authorization": "AWS4-HMAC-SHA256 Credential=x/20260101/us-east-1/s3/"}
        )
        response = connection.getresponse()
        content = response.read()
        assert response.status < 400, content
        return content
    finally:
        connection.close()


class Seen(NamedTuple):
    """A request that came to the proxy."""

    number: int
    method: str
    path: str
    port: int  # that it came from

    @property
    def pid(self) -> int | None:
        """The process that made it."""
        for connection in psutil.net_connections("tcp4"):
            if connection.laddr and connection.laddr.port == self.port and connection.status == "ESTABLISHED":
                return connection.pid
        return None


class Proxy:
    """Passes requests on to an S3 server. `decide` says of each what becomes of it.

    It returns None to pass the request on, a status to answer with, or 0 to break the connection off.
    """

    def __init__(self, port: int) -> None:
        self.decide: Callable[[Seen], int | None] = lambda seen: None
        self.delay_s = 0.0
        self.num_failed = 0
        self.seen: list[Seen] = []
        lock, proxy = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _pass(self) -> None:
                with lock:
                    seen = Seen(len(proxy.seen) + 1, self.command, self.path, self.client_address[1])
                    proxy.seen.append(seen)
                body = self._body()
                time.sleep(proxy.delay_s)
                status = proxy.decide(seen)
                if status is not None:
                    proxy.num_failed += 1
                    self._refuse(status)
                    return
                headers = {k: v for k, v in self.headers.items() if k.lower() not in ("transfer-encoding", "expect")}
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
                try:
                    if "Content-Length" in headers:
                        headers["Content-Length"] = str(len(body))
                    connection.request(self.command, self.path, body, headers)
                    response = connection.getresponse()
                    content = response.read()
                    self.send_response(response.status)
                    for name, value in response.getheaders():
                        if name.lower() not in ("connection", "transfer-encoding", "content-length", "server", "date"):
                            self.send_header(name, value)
                    length = response.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
                    self.send_header("Content-Length", length or "0")
                    self.end_headers()
                    if self.command != "HEAD":
                        self.wfile.write(content)
                finally:
                    connection.close()

            def _body(self) -> bytes:
                if "chunked" in self.headers.get("Transfer-Encoding", ""):
                    body = b""
                    while size := int(self.rfile.readline().split(b";")[0], 16):
                        body += self.rfile.read(size)
                        self.rfile.readline()
                    self.rfile.readline()
                    return body
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))

            def _refuse(self, status: int) -> None:
                if status == 0:
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                code = {403: "AccessDenied", 503: "SlowDown"}.get(status, "InternalError")
                content = f"<Error><Code>{code}</Code><Message>by the proxy</Message></Error>".encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/xml")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: object) -> None:
                pass  # a client that was killed

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
