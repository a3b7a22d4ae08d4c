"""The web server of the dashboard: read-only, for one person on this host.

Every route wants the token, which the address that is printed carries once and a cookie keeps. Other sites cannot use
the cookie (SameSite, Origin, Sec-Fetch-Site), other names of this host are refused (Host), and a page can load nothing
from elsewhere (Content-Security-Policy).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import secrets
import socket
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlencode

import msgspec

from cordee.core.errors import JobError, MissingExtraError, RunDirectoryError
from cordee.dashboard.reading import Runs
from cordee.monitoring.run_directory import EVENTS_FILE, LOCK_FILE, is_locked

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse, RedirectResponse, Response
    from starlette.routing import Route
    from starlette.types import ASGIApp, Receive, Scope, Send
except ImportError:
    raise MissingExtraError("the dashboard", "dashboard") from None

PAGES = Path(__file__).parent / "pages"
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_MOST_STREAMS = 16
_SLOWEST_READER_S = 10.0  # a reader that takes nothing for so long is dropped
_MOST_CONNECTIONS = 64
_LOOK_EVERY_S = 0.5
_QUIET_S = 15.0  # after which a stream says that it lives
_MOST_COLUMNS = 4000


class Gate:
    """Lets only requests of the one person pass; adds the headers that keep pages to themselves."""

    def __init__(self, app: ASGIApp, token: str, hosts: frozenset[str]) -> None:
        self._app = app
        self._token = token
        self._hosts = hosts
        # Cookies belong to a host, whatever the port: a second dashboard would take the first one's away.
        self._cookie = "_".join(["cordee_token", *sorted({host.rpartition(":")[2] for host in hosts})])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refused = self._refuse(scope)
        await (refused or self._app)(scope, receive, with_headers(send))

    def _refuse(self, scope: Scope) -> Response | None:
        request = Request(scope)
        headers = request.headers
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("this server only reads", 405, {"allow": "GET, HEAD"})
        if headers.get("host", "").lower() not in self._hosts:
            return PlainTextResponse("another name of this host: use the address that was printed", 421)
        origin = headers.get("origin")
        if origin is not None and origin.lower() not in {f"http://{host}" for host in self._hosts}:
            return PlainTextResponse("requests of other sites are refused", 403)
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        # A link that somebody clicks on elsewhere may open the page, but only with the token in it.
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and not given:
            return PlainTextResponse("requests of other sites are refused", 403)
        if given:
            if not self._is_token(given):
                return PlainTextResponse("a wrong token: use the address that `cordee dashboard` printed", 401)
            rest = [(key, value) for key, value in request.query_params.multi_items() if key != "token"]
            path = "/" + scope["path"].lstrip("/")  # two slashes would be another host
            answer = RedirectResponse(path + (f"?{urlencode(rest)}" if rest else ""), 303)
            answer.set_cookie(self._cookie, self._token, httponly=True, samesite="strict", path="/")
            return answer
        if not self._is_token(request.cookies.get(self._cookie, "")):
            return PlainTextResponse("no token: use the address that `cordee dashboard` printed", 401)
        return None

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())


def with_headers(send: Send) -> Send:
    """Return a `send` that adds the headers of every answer."""

    async def sending(message: Any) -> None:
        if message["type"] == "http.response.start":
            own = [(key.encode(), value.encode()) for key, value in _HEADERS.items()]
            message = {**message, "headers": [*message.get("headers", []), *own]}
        await send(message)

    return sending


class Pages:
    """What the routes answer."""

    def __init__(self, runs: Runs, is_closing: Callable[[], bool]) -> None:
        self._runs = runs
        self.is_closing = is_closing
        self.num_streams = 0

    def routes(self) -> list[Route]:
        return [
            Route("/", self.shell),
            Route("/run/{name}", self.shell),
            Route("/pages/{file}", self.file),
            Route("/api/runs", self.answering(lambda request: self._runs.list())),
            Route("/api/run/{name}", self.answering(lambda request: self._runs.overview(_name(request)))),
            Route("/api/run/{name}/series", self.answering(self.part(self._runs.series))),
            Route("/api/run/{name}/lanes", self.answering(self.part(self._runs.lanes))),
            Route("/api/run/{name}/job", self.answering(lambda request: self._runs.job(_name(request)))),
            Route("/api/run/{name}/logs", self.answering(self.logs)),
            Route("/api/run/{name}/stream", self.stream),
        ]

    async def shell(self, request: Request) -> Response:
        return _file("index.html")

    async def file(self, request: Request) -> Response:
        return _file(request.path_params["file"])

    def answering(self, make: Callable[[Request], Any]) -> Callable[[Request], Awaitable[Response]]:
        """Return a route that answers with what `make` returns, as JSON; reading takes place in another thread."""

        async def answer(request: Request) -> Response:
            try:
                made = await asyncio.to_thread(make, request)
            except RunDirectoryError as error:
                return _json({"error": str(error)}, 404)
            except (ValueError, OverflowError):
                return _json({"error": "begin, end and columns must be numbers"}, 400)
            return _json(made)

        return answer

    def part(self, read: Callable[[str, float, float, int], Any]) -> Callable[[Request], Any]:
        """Return what answers with a part of the time of a run in so many columns."""

        def answer(request: Request) -> Any:
            asked = request.query_params
            begin, end = float(asked.get("begin", 0)), float(asked.get("end", 0))
            columns = min(max(int(asked.get("columns", 800)), 1), _MOST_COLUMNS)
            if not 0 <= begin <= end < 1e12:
                raise ValueError("begin is after end")
            return read(_name(request), begin, end, columns)

        return answer

    def logs(self, request: Request) -> Any:
        return self._runs.logs(_name(request), request.query_params.get("member", ""))

    async def stream(self, request: Request) -> Response:
        """Say that there is something new: the id of a message is the place where the events end.

        The first message is sent at once, so that a page that connects again misses nothing.
        """
        try:
            path = self._runs.find(_name(request))
        except RunDirectoryError as error:
            return _json({"error": str(error)}, 404)
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        if self.num_streams >= _MOST_STREAMS:
            return _json({"error": f"{_MOST_STREAMS} pages follow runs already: close one"}, 503)
        return _Stream(self, path)


class _Stream(Response):
    """Server-sent events of one run."""

    def __init__(self, pages: Pages, path: Path) -> None:
        super().__init__()
        self._pages = pages
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._pages.num_streams += 1
        gone = asyncio.ensure_future(_wait_until_gone(receive))
        try:
            headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._send_all(send, gone)
        finally:
            gone.cancel()
            self._pages.num_streams -= 1

    async def _send_all(self, send: Send, gone: asyncio.Future[None]) -> None:
        """Say that there is something new, and where it ends; the page then asks for what it shows."""
        said, quiet_s = (False, -1), 0.0
        while not (gone.done() or self._pages.is_closing()):
            # Twice a second for each page: no file is opened but the lock.
            found = await asyncio.to_thread(lambda: (_is_running(self._path), _end_of_events(self._path)))
            if found != said or quiet_s >= _QUIET_S:
                said, quiet_s = found, 0.0
                is_running, offset = found
                news = msgspec.json.encode({"is_running": is_running, "offset": offset}).decode()
                body = f"id: {offset}\ndata: {news}\n\n".encode()
                await send({"type": "http.response.body", "body": body, "more_body": True})
            await asyncio.wait([gone], timeout=_LOOK_EVERY_S)
            quiet_s += _LOOK_EVERY_S
        if not gone.done():
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def _is_running(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return is_locked(path / LOCK_FILE)
    return False


def _end_of_events(path: Path) -> int:
    """Return where the events of a run end; 0 where there are none. Another run in this place may have fewer."""
    try:
        return os.lstat(path / EVENTS_FILE).st_size
    except OSError:
        return 0


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _name(request: Request) -> str:
    return str(request.path_params["name"])


def _file(name: str) -> Response:
    path = PAGES / name
    if path.parent != PAGES or not path.is_file() or path.suffix not in _TYPES:
        return PlainTextResponse("there is no such page", 404)
    return Response(path.read_bytes(), media_type=_TYPES[path.suffix])


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def make_app(runs: Runs, token: str, hosts: frozenset[str], is_closing: Callable[[], bool] = lambda: False) -> ASGIApp:
    """Return the application; `hosts` are the values of the Host header that are answered."""
    return Gate(Starlette(routes=Pages(runs, is_closing).routes()), token, hosts)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Raises JobError if the address cannot be used."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # The system drops a connection whose reader takes nothing; what was written for it is freed.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * _SLOWEST_READER_S))
        listener.bind((host, port))
        listener.listen(128)  # before the address is said: whoever opens it at once waits, and is not refused
    except OSError as error:
        listener.close()
        raise JobError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another --port, or none: the system chooses one"
        ) from None
    return listener


def configure(app: ASGIApp) -> uvicorn.Config:
    """Return how the server runs: without an access log, without WebSockets, with a limit of connections."""
    return uvicorn.Config(
        app,
        log_level="error",  # whoever reaches the port could fill the terminal with warnings of bad requests
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=3,
        limit_concurrency=_MOST_CONNECTIONS,
        ws="none",
        lifespan="off",
    )


class _Server(uvicorn.Server):
    """Reads in few threads; has streams end before it waits for them."""

    def __init__(self, config: uvicorn.Config, is_closing: threading.Event) -> None:
        super().__init__(config)
        self._is_closing = is_closing

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        # One reads runs, which only one may at a time, another looks at locks: each thread keeps memory of its own.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._is_closing.set()
        await super().shutdown(sockets)


def serve(
    folder: Path, run: Path | None, address: tuple[str, int], say: Callable[[str], None], *, until_closed: bool = False
) -> None:
    """Serve until Ctrl-C, or with `until_closed` until standard input ends: whoever started this process has gone.

    Raises JobError if the address cannot be used.
    """
    listener = listen(*address)
    host = address[0]
    port = listener.getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    token = secrets.token_urlsafe(32)
    names = {shown, "localhost"} if host in ("127.0.0.1", "::1") else {shown}
    is_closing = threading.Event()
    app = make_app(Runs(folder, run), token, frozenset(f"{name}:{port}" for name in names), is_closing.is_set)
    start = f"/run/{quote(run.name)}" if run is not None else "/"
    say(f"http://{shown}:{port}{start}?token={token}")
    server = _Server(configure(app), is_closing)

    def wait_for_end() -> None:
        sys.stdin.buffer.read()
        server.should_exit = True

    if until_closed:
        threading.Thread(target=wait_for_end, daemon=True).start()
    try:
        server.run(sockets=[listener])
    except KeyboardInterrupt:
        pass
    finally:
        listener.close()
