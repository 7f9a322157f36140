"""Watching runs: the served page, the progress display on the terminal, and the commands."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cli import fedkeep
from support.errors import raises
from support.synthetic import records, wave, write_pair, write_run

from fedkeep.cli import app
from fedkeep.errors import RunError
from fedkeep.reports.watch import HOST, Source, serve


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair(tmp_path_factory.mktemp("runs"))


class Client:
    """Sends requests to a server that runs in a thread of this process."""

    def __init__(self, runs: list[Path]) -> None:
        self.server = serve(runs, 0)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def __call__(self, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=120)
        connection.request(method, path, headers={key.replace("_", "-"): value for key, value in headers.items()})
        response = connection.getresponse()
        body = response.read()
        connection.close()
        return response.status, dict(response.getheaders()), body

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def request_page(pair: Path) -> Iterator[Client]:
    client = Client([pair])
    yield client
    client.close()


def test_the_page_and_its_data_are_served_on_loopback_only(request_page: Client) -> None:
    assert request_page.server.server_address[0] == "127.0.0.1"
    status, headers, body = request_page("/")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert b'<h1 id="headline">fedntd ' in body
    status, headers, body = request_page("/data.json")
    assert json.loads(body)["live"]
    assert request_page("/data.json", If_None_Match=headers["ETag"])[0] == 304
    assert request_page("/", method="HEAD")[2] == b""


@pytest.mark.parametrize("path", ["/x", "/..", "/../../etc/passwd", "/static/", "/fedavg-0/rounds.jsonl"])
def test_nothing_else_is_served(request_page: Client, path: str) -> None:
    assert request_page(path)[0] == 404


def test_other_host_names_and_other_methods_are_rejected(request_page: Client) -> None:
    assert request_page("/", Host="evil.example")[0] == 403
    assert request_page("/data.json", Host=f"evil.example:{request_page.port}")[0] == 403
    assert request_page("/", Host=HOST)[0] == 403  # without the port it is not ours
    assert request_page("/", Host=f"localhost:{request_page.port}")[0] == 200
    assert request_page("/", method="POST")[0] == 501


def test_a_run_in_progress_is_shown_up_to_its_last_complete_line(tmp_path: Path) -> None:
    lines = records(wave(0))
    run = write_run(tmp_path / "run", lines[:1], rounds=4)
    rounds, source = run / "rounds.jsonl", Source([tmp_path])

    def now() -> dict:
        source._next_update = 0  # no pause
        return source.data()

    assert now()["problems"] == []
    for t, line in enumerate(lines[1:], start=1):
        text = json.dumps(line) + "\n"
        with open(rounds, "a") as file:
            file.write(text[: len(text) // 2])
            file.flush()
            groups = [group for problem in now()["problems"] for group in problem["groups"]]
            reached = [run["reached"] for group in groups for run in group["runs"]]
            assert reached == ([] if t == 1 else [t - 1])  # the incomplete line does not count
            file.write(text[len(text) // 2 :])
        assert now()["problems"][0]["groups"][0]["runs"][0]["reached"] == t
    same = now()
    assert now() is same  # nothing new was written: nothing is computed again
    rounds.write_text("not a round\n")
    assert now() is same  # the last good data stays


def test_a_damaged_run_is_left_out_and_every_request_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pair(tmp_path, seeds=1)
    bad = write_run(tmp_path / "bad", records(wave(0)))
    (bad / "rounds.jsonl").write_text("garbage\n")
    client = Client([tmp_path])
    try:
        data = json.loads(client("/data.json")[2])
        assert [g["label"] for p in data["problems"] for g in p["groups"]] == ["fedavg", "fedntd"]
        assert data["left_out"][0]["run"] == str(bad)
        monkeypatch.setattr("fedkeep.reports.watch.read_runs", lambda runs: 1 / 0)
        monkeypatch.setattr("fedkeep.reports.watch.PAUSE_FACTOR", 0)
        (bad / "rounds.jsonl").write_text("other garbage\n")
        assert client("/")[0] == client("/data.json")[0] == 200, "the last good data stays"
    finally:
        client.close()


def test_no_other_page_may_frame_this_one(request_page: Client) -> None:
    for path in ("/", "/data.json", "/x"):
        headers = request_page(path)[1]
        assert headers["Content-Security-Policy"] == "frame-ancestors 'none'"
        assert headers["X-Frame-Options"] == "DENY"


def test_there_is_a_pause_between_two_updates(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source([pair])
    first = source.data()
    monkeypatch.setattr("fedkeep.reports.watch._stamp", lambda file: (time.monotonic_ns(), 0))
    assert source.data() is first  # during the pause
    source._next_update = 0
    assert source.data() is not first


def test_a_port_in_use_and_a_folder_without_runs_raise(pair: Path, tmp_path: Path) -> None:
    with serve([pair], 0) as server:
        port = server.server_address[1]
        with raises(RunError, key="port", value=port):
            serve([pair], port)
    with raises(RunError, mentions=[str(tmp_path)]):
        serve([tmp_path], 0)


# the commands


def test_report_writes_the_page_and_prints_its_path(pair: Path, tmp_path: Path) -> None:
    done = fedkeep("report", str(pair), "-o", "page.html", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "page.html").read_text()
    headline = page.split('<h1 id="headline">')[1].split("</h1>")[0]
    assert headline.split() == done.stdout.split()[: len(headline.split())]
    assert "page.html" in done.stdout.splitlines()[-1]
    assert page.startswith("<!doctype html>")
    summary = json.loads(fedkeep("report", str(pair), "--json", cwd=tmp_path).stdout)
    assert summary["page"] == "report.html"
    assert summary["bytes"] == (tmp_path / "report.html").stat().st_size


def test_invalid_arguments_exit_with_code_2_and_one_line(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    no = tmp_path / "no" / "page.html"
    for args, parts in [
        (["report", pair / "fedavg-0x"], [f"{pair / 'fedavg-0x'}", f"{pair / 'fedavg-0'}?"]),
        (["report", tmp_path], [f"{tmp_path}"]),
        (["report", pair, "-o", no], [f"{no.parent}"]),
        (["report", pair, "-o", tmp_path], [f"{tmp_path}"]),
        (["watch", pair / "fedntd-7"], [f"{pair / 'fedntd-7'}", f"{pair / 'fedntd-'}"]),
        (["demo", "-o", no], [f"{no.parent}"]),
        (["report"], ["RUN..."]),
        (["watch", pair, "--port", "70000"], ["--port", "70000"]),
        (["compare", pair, "--target", "2"], ["--target", "2"]),
        (["compare", pair, "--against", "fedxyz"], ["'fedxyz'", "fedavg", "fedntd"]),
    ]:
        monkeypatch.setattr(sys, "argv", ["fedkeep", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            app.main()
        errors = capsys.readouterr().err
        assert ended.value.code == 2, args
        assert all(part in errors for part in parts), errors
        assert errors.count("\n") == 1 or "Usage" in errors


def test_watch_serves_until_ctrl_c(pair: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "fedkeep", "watch", str(pair), "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # some shells ignore it
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    port = int(line.split("/")[2].split(":")[1])
    connection = http.client.HTTPConnection(HOST, port, timeout=120)
    connection.request("GET", "/data.json")
    assert json.loads(connection.getresponse().read())["problems"]
    connection.close()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors


# the demonstration


def test_the_demo_writes_its_page(tmp_path: Path) -> None:
    done = fedkeep("demo", "--seeds", "1", "--rounds", "2", cwd=tmp_path, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert "fedkeep-demo.html" in done.stdout.splitlines()[-1]
    assert [p.name for p in tmp_path.iterdir()] == ["fedkeep-demo.html"]  # the run folders are removed
    data = (tmp_path / "fedkeep-demo.html").read_text().split('type="application/json">')[1].split("</script>")[0]
    labels = {"fedavg", "scaffold", "fedntd", "fedkeep"}
    assert {g["label"] for g in json.loads(data)["problems"][0]["groups"] if g["runs"][0]["anatomy"]} == labels
