"""Who may read what from the dashboard: each rule of its threat model by a real request."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import uvicorn
from starlette.requests import Request

from cordee.core.errors import JobError
from cordee.dashboard import server as dashboard_server
from cordee.dashboard.reading import Runs
from cordee.dashboard.server import Pages, make_app, serve
from cordee.monitoring import JsonlSink, Monitor, RunDirectory, events

TOKEN = "t" * 43


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes


class Site:
    def __init__(self, port: int, runs: Path) -> None:
        self.port = port
        self.runs = runs

    def ask(self, path: str, *, method: str = "GET", token: str = TOKEN, **headers: str) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        sent = {key.replace("_", "-"): value for key, value in headers.items()}
        sent |= {"cookie": f"cordee_token={token}"} if token else {}
        connection.request(method, path, headers=sent)
        answer = connection.getresponse()
        found = Answer(answer.status, {key.lower(): value for key, value in answer.getheaders()}, answer.read())
        connection.close()
        return found


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with RunDirectory.create(tmp_path / "runs" / "one", 'name = "<b>iris</b>"\n') as run:
        with Monitor([JsonlSink(run.events_file)]) as monitor:
            monitor.emit(events.RunStarted(strategy="x", workers=1, start_step=0))
            monitor.emit(events.Step(step=1, loss=2.0))
        (run.path / "control.json").write_text('{"keys": "secret"}')
        (run.path / "logs" / "worker-0.log").write_text("hello\n")
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    app = make_app(Runs(tmp_path / "runs"), TOKEN, frozenset({f"127.0.0.1:{port}", f"localhost:{port}"}))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    yield Site(port, tmp_path / "runs")
    server.should_exit = True
    thread.join()
    listener.close()


ROUTES = [
    "/",
    "/run/one",
    "/pages/main.js",
    "/api/runs",
    "/api/run/one",
    "/api/run/one/series?end=10",
    "/api/run/one/lanes?end=10",
    "/api/run/one/job",
]


@pytest.mark.parametrize("route", [*ROUTES, "/api/run/one/logs", "/api/run/one/stream", "/nothing"])
def test_every_route_wants_the_token(site: Site, route: str) -> None:
    assert site.ask(route, token="").status == 401
    assert site.ask(route, token="x" * 43).status == 401


@pytest.mark.parametrize("route", [*ROUTES, "/api/run/one/logs"])
def test_with_the_token_everything_is_answered_and_keeps_to_itself(site: Site, route: str) -> None:
    answer = site.ask(route)
    assert answer.status == 200
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-store"
    assert "access-control-allow-origin" not in answer.headers


def test_the_token_of_the_address_becomes_a_cookie_and_leaves_the_address(site: Site) -> None:
    answer = site.ask(f"/run/one?token={TOKEN}&x=1", token="")
    assert (answer.status, answer.headers["location"]) == (303, "/run/one?x=1")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert site.ask("/?token=wrong", token="").status == 401


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_changed(site: Site, method: str) -> None:
    assert site.ask("/api/runs", method=method).status == 405


def test_other_names_of_the_host_and_other_sites_are_refused(site: Site) -> None:
    assert site.ask("/", host="evil.example").status == 421
    assert site.ask("/", host=f"localhost:{site.port}").status == 200
    assert site.ask("/api/runs", origin="http://evil.example").status == 403
    assert site.ask("/api/runs", sec_fetch_site="cross-site").status == 403
    assert site.ask("/api/runs", origin=f"http://127.0.0.1:{site.port}", sec_fetch_site="same-origin").status == 200


@pytest.mark.parametrize(
    "path",
    [
        "/pages/../server.py",
        "/pages/..%2fserver.py",
        "/pages/%2e%2e",
        "/run/one/control.json",
        "/api/run/one/control.json",
        "/api/run/..%2f..%2fetc",
        "/api/run/%2e%2e/job",
    ],
)
def test_no_other_file_is_served(site: Site, path: str) -> None:
    answer = site.ask(path)
    assert answer.status == 404
    assert b"secret" not in answer.body


def test_markup_of_a_run_is_text(site: Site) -> None:
    answer = site.ask("/api/runs")
    assert answer.headers["content-type"] == "application/json"
    assert json.loads(answer.body)[0]["name"] == "<b>iris</b>"
    assert b"innerHTML" not in b"".join(site.ask(f"/pages/{file}").body for file in ("run.js", "runs.js", "chart.js"))


@pytest.mark.parametrize("query", ["begin=x", "begin=5&end=1", "end=nan", "end=1e99", "end=5&columns=x"])
def test_numbers_that_make_no_sense(site: Site, query: str) -> None:
    answer = site.ask(f"/api/run/one/series?{query}")
    assert (answer.status, "error" in json.loads(answer.body)) == (400, True)


def read_message(stream: http.client.HTTPResponse) -> dict[str, str]:
    fields = {}
    while (line := stream.readline().strip()) or not fields:
        key, _, value = line.decode().partition(": ")
        fields[key] = value
    return fields


def test_a_stream_says_what_is_new_by_its_place_in_the_file(site: Site) -> None:
    size = (site.runs / "one" / "events.jsonl").stat().st_size
    connection = http.client.HTTPConnection("127.0.0.1", site.port, timeout=10)
    connection.request("GET", "/api/run/one/stream?offset=0", headers={"cookie": f"cordee_token={TOKEN}"})
    stream = connection.getresponse()
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert read_message(stream)["id"] == str(size)
    sink = JsonlSink(site.runs / "one" / "events.jsonl")
    with Monitor([sink]) as monitor:
        monitor.emit(events.Step(step=2, loss=1.0))
    message = read_message(stream)
    assert int(message["id"]) > size
    assert json.loads(message["data"])["offset"] == int(message["id"])
    connection.close()


def follow_stream(site: Site) -> tuple[socket.socket, bytes]:
    """Open a stream; return its socket and the first line of the answer."""
    opened = socket.create_connection(("127.0.0.1", site.port), timeout=20)
    request = f"GET /api/run/one/stream HTTP/1.1\r\nhost: 127.0.0.1:{site.port}\r\ncookie: cordee_token={TOKEN}\r\n\r\n"
    opened.sendall(request.encode())
    return opened, opened.recv(4096).split(b"\r\n")[0]


def test_only_so_many_pages_follow_runs(site: Site) -> None:
    streams = [follow_stream(site) for _ in range(17)]
    assert [line for _, line in streams[:16]] == [b"HTTP/1.1 200 OK"] * 16
    assert streams[16][1] == b"HTTP/1.1 503 Service Unavailable"
    for opened, _ in streams:
        opened.close()
    deadline_s = time.monotonic() + 20
    while time.monotonic() < deadline_s:  # those that left make room
        opened, line = follow_stream(site)
        opened.close()
        if line == b"HTTP/1.1 200 OK":
            return
    pytest.fail("no stream was let go")


def test_a_reader_that_takes_nothing_is_let_go(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard_server, "_SLOWEST_READER_S", 0.2)
    pages = Pages(Runs(site.runs), lambda: False)

    async def stuck() -> None:
        async def receive() -> Any:
            await asyncio.sleep(60)

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                await asyncio.sleep(60)

        request = Request({"type": "http", "path_params": {"name": "one"}, "headers": [], "query_string": b""})
        await (await pages.stream(request))({}, receive, send)  # type: ignore[operator]

    asyncio.run(asyncio.wait_for(stuck(), 10))
    assert pages.num_streams == 0


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(JobError, match=f"cannot listen on 127.0.0.1:{port}: .*choose another --port"):
            serve(Path(), None, ("127.0.0.1", port), print)
