"""Who may read what from the dashboard: each rule of its threat model by a real request."""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
import uvicorn

from cordee.core.errors import JobError
from cordee.dashboard import server as dashboard_server
from cordee.dashboard.reading import Runs
from cordee.dashboard.server import Gate, configure, listen, make_app, serve
from cordee.monitoring import JsonlSink, Monitor, RunDirectory, events

TOKEN = "t" * 43


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes


class Site:
    def __init__(self, port: int, runs: Path, server: uvicorn.Server) -> None:
        self.port = port
        self.server = server
        self.runs = runs

    def ask(self, path: str, *, method: str = "GET", token: str = TOKEN, **headers: str) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        sent = {key.replace("_", "-"): value for key, value in headers.items()}
        sent |= {"cookie": f"cordee_token_{self.port}={token}"} if token else {}
        connection.request(method, path, headers=sent)
        answer = connection.getresponse()
        found = Answer(answer.status, {key.lower(): value for key, value in answer.getheaders()}, answer.read())
        connection.close()
        return found


@pytest.fixture
def site(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A dashboard that is served; its parameter is the patience with readers, in seconds."""
    monkeypatch.setattr(dashboard_server, "_SLOWEST_READER_S", getattr(request, "param", 10.0))
    with RunDirectory.create(tmp_path / "runs" / "one", 'name = "<b>iris</b>"\n') as run:
        with Monitor([JsonlSink(run.events_file)]) as monitor:
            monitor.emit(events.RunStarted(strategy="x", workers=1, start_step=0))
            monitor.emit(events.Step(step=1, loss=2.0))
        (run.path / "control.json").write_text('{"keys": "secret"}')
        (run.path / "logs" / "worker-0.log").write_text("hello\n")
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    app = make_app(Runs(tmp_path / "runs"), TOKEN, frozenset({f"127.0.0.1:{port}", f"localhost:{port}"}))
    server = uvicorn.Server(configure(app))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    yield Site(port, tmp_path / "runs", server)
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
    connection.request("GET", "/api/run/one/stream", headers={"cookie": f"cordee_token_{site.port}={TOKEN}"})
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


def connect(site: Site, path: str, method: str = "GET", *, receive_bytes: int = 0) -> socket.socket:
    """Send a request, and read nothing of the answer."""
    opened = socket.socket()
    opened.settimeout(20)
    if receive_bytes:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    opened.connect(("127.0.0.1", site.port))
    cookie = f"cordee_token_{site.port}={TOKEN}"
    opened.sendall(f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1:{site.port}\r\ncookie: {cookie}\r\n\r\n".encode())
    return opened


def follow_stream(site: Site) -> tuple[socket.socket, bytes]:
    """Open a stream; return its socket and the first line of the answer."""
    opened = connect(site, "/api/run/one/stream")
    return opened, opened.recv(4096).split(b"\r\n")[0]


def test_a_stream_that_is_only_asked_about_ends_at_once(site: Site) -> None:
    for _ in range(20):  # more than there may be at a time
        answer = site.ask("/api/run/one/stream", method="HEAD")
        assert (answer.status, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")


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


@pytest.mark.parametrize("site", [0.3], indirect=True)
def test_a_reader_that_takes_nothing_is_dropped(site: Site) -> None:
    for worker in range(20):  # an answer of 20 MB
        (site.runs / "one" / "logs" / f"worker-{worker}.log").write_text(("x" * 16_000 + "\n") * 60)
    with connect(site, "/api/run/one/logs", receive_bytes=4096) as opened:
        connections, deadline_s = site.server.server_state.connections, time.monotonic() + 30
        while not connections and time.monotonic() < deadline_s:
            time.sleep(0.01)
        while connections:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        read_bytes = 0
        with contextlib.suppress(ConnectionResetError):
            while part := opened.recv(1 << 16):
                read_bytes += len(part)
    assert read_bytes < 1 << 20
    assert site.ask("/api/runs").status == 200


def test_connections_are_capped(site: Site) -> None:
    idle = [socket.create_connection(("127.0.0.1", site.port), timeout=20) for _ in range(100)]
    answer, deadline_s = site.ask("/api/runs", token=""), time.monotonic() + 20
    while answer.status == 401 and time.monotonic() < deadline_s:  # until all have been accepted
        answer = site.ask("/api/runs", token="")
    assert answer.status == 503
    for opened in idle:
        opened.close()
    while site.ask("/api/runs").status == 503:
        assert time.monotonic() < deadline_s


def test_two_dashboards_do_not_take_each_others_cookie(tmp_path: Path) -> None:
    async def nothing(*_: object) -> None:
        pytest.fail("let through")

    def cookie_of(port: int) -> str:
        gate = Gate(nothing, TOKEN, frozenset({f"127.0.0.1:{port}", f"localhost:{port}"}))
        headers = [(b"host", f"localhost:{port}".encode())]
        found = gate._refuse(
            {
                "type": "http",
                "method": "GET",
                "path": "/",
                "query_string": f"token={TOKEN}".encode(),
                "headers": headers,
            }
        )
        assert found is not None
        return found.headers["set-cookie"].partition("=")[0]

    assert cookie_of(1001) != cookie_of(1002)


def test_the_token_does_not_send_anybody_to_another_host(site: Site) -> None:
    assert site.ask(f"//evil.example/?token={TOKEN}", token="").headers["location"] == "/evil.example/"


def test_keys_journals_and_checkpoints_are_never_read(site: Site) -> None:
    """Whoever may ask for everything gets nothing of them, under whatever name."""
    run = site.runs / "one"
    for name in ("control.json", "journal.jsonl", "journal", "keys", "checkpoints/step-00000001/weights.safetensors"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("secret-of-the-run")
    (run / "logs" / "launcher.log").symlink_to(run / "journal.jsonl")
    (run / "timeline").mkdir(exist_ok=True)
    (run / "timeline" / "worker-0.jsonl").symlink_to(run / "journal.jsonl")
    paths = [*ROUTES, "/api/run/one/logs", "/api/run/one/logs?member=launcher", "/api/run/one/logs?member=../journal"]
    for name in ("control.json", "journal.jsonl", "journal", "keys", "checkpoints/step-00000001/weights.safetensors"):
        paths += [f"/{name}", f"/run/one/{name}", f"/api/run/one/{name}", f"/pages/../../runs/one/{name}"]
        paths += [f"/api/run/one%2f{name}", f"/api/run/one/logs?member=../{name}", f"/pages/%2e%2e/{name}"]
    for path in paths:
        assert b"secret-of-the-run" not in site.ask(path).body, path


@pytest.mark.parametrize("name", ["job.toml", "events.jsonl", "summary.json", "logs/worker-0.log", "logs", "timeline"])
def test_links_in_a_run_directory_show_nothing(site: Site, tmp_path: Path, name: str) -> None:
    secret = tmp_path / "outside"
    if name in ("logs", "timeline"):
        secret.mkdir()
        (secret / "worker-0.log").write_text("secret-elsewhere\n")
        (secret / "worker-0.jsonl").write_text("secret-elsewhere\n")
    else:
        secret.write_text("name = 'secret-elsewhere'\n")
    path = site.runs / "one" / name
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to(secret)
    for route in [*ROUTES, "/api/run/one/logs"]:
        answer = site.ask(route)
        assert b"secret-elsewhere" not in answer.body, route
        assert answer.status in (200, 404), route


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(JobError, match=f"cannot listen on 127.0.0.1:{port}: .*choose another --port"):
            serve(Path(), None, ("127.0.0.1", port), print)
