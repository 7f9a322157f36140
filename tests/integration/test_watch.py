"""Looking on: the served page, the terminal's live view, and the commands."""

from __future__ import annotations

import http.client
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console
from support.cli import fedkeep
from support.synthetic import records, wave, write_pair, write_run

from fedkeep.cli import app, progress
from fedkeep.cli.progress import RunProgress
from fedkeep.errors import RunError
from fedkeep.reports.watch import HOST, Source, serve


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair(tmp_path_factory.mktemp("runs"))


class Asker:
    """Asks a server that runs in a thread of this process."""

    def __init__(self, runs: list[Path]) -> None:
        self.server = serve(runs, 0)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def __call__(self, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=30)
        connection.request(method, path, headers={key.replace("_", "-"): value for key, value in headers.items()})
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return answer.status, dict(answer.getheaders()), body

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def ask(pair: Path) -> Iterator[Asker]:
    asker = Asker([pair])
    yield asker
    asker.close()


def test_the_page_and_its_data_are_served_on_loopback_alone(ask: Asker) -> None:
    assert ask.server.server_address[0] == "127.0.0.1"
    status, headers, body = ask("/")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert b"fedntd forgets least" in body
    status, headers, body = ask("/data.json")
    assert json.loads(body)["live"]
    assert ask("/data.json", If_None_Match=headers["ETag"])[0] == 304
    assert ask("/", method="HEAD")[2] == b""


@pytest.mark.parametrize("path", ["/x", "/..", "/../../etc/passwd", "/static/", "/fedavg-0/rounds.jsonl"])
def test_nothing_else_is_served(ask: Asker, path: str) -> None:
    assert ask(path)[0] == 404


def test_other_names_and_other_verbs_are_refused(ask: Asker) -> None:
    assert ask("/", Host="evil.example")[0] == 403
    assert ask("/data.json", Host=f"evil.example:{ask.port}")[0] == 403
    assert ask("/", Host=HOST)[0] == 403  # without the port it is not ours
    assert ask("/", Host=f"localhost:{ask.port}")[0] == 200
    assert ask("/", method="POST")[0] == 501


def test_a_run_that_is_being_written_is_shown_as_far_as_it_is_whole(tmp_path: Path) -> None:
    lines = records(wave(0))
    run = write_run(tmp_path / "run", lines[:1], rounds=4)
    rounds, source = run / "rounds.jsonl", Source([tmp_path])

    def now() -> dict:
        source._next = 0  # no rest between two looks
        return source.data()

    assert "evaluated round" in now()["verdict"]["headline"]
    for t, line in enumerate(lines[1:], start=1):
        text = json.dumps(line) + "\n"
        with open(rounds, "a") as file:
            file.write(text[: len(text) // 2])
            file.flush()
            seen = now()["groups"]
            assert [r["reached"] for g in seen for r in g["runs"]] == ([] if t == 1 else [t - 1])  # the torn line waits
            file.write(text[len(text) // 2 :])
        assert now()["groups"][0]["runs"][0]["reached"] == t
    same = now()
    assert now() is same  # nothing new was written: nothing is made again
    rounds.write_text("not a round\n")
    assert now() is same  # what was seen last stays


def test_a_page_that_takes_long_is_not_made_all_the_time(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source([pair])
    first = source.data()
    monkeypatch.setattr("fedkeep.reports.watch._stamp", lambda file: (time.monotonic_ns(), 0))
    assert source.data() is first  # it rests
    source._next = 0
    assert source.data() is not first


def test_a_taken_port_and_no_run_are_said_at_once(pair: Path, tmp_path: Path) -> None:
    with serve([pair], 0) as server, pytest.raises(RunError, match="choose another, or 0"):
        serve([pair], server.server_address[1])
    with pytest.raises(RunError, match="holds none"):
        serve([tmp_path], 0)


# the commands


def test_report_writes_the_page_and_says_where(pair: Path, tmp_path: Path) -> None:
    done = fedkeep("report", str(pair), "-o", "page.html", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "fedntd forgets least" in " ".join(done.stdout.split())
    assert "The page: page.html" in done.stdout
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    told = json.loads(fedkeep("report", str(pair), "--json", cwd=tmp_path).stdout)
    assert told["page"] == "report.html"
    assert told["bytes"] == (tmp_path / "report.html").stat().st_size


def test_bad_input_ends_in_one_line_with_the_nearest_choice(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    no = tmp_path / "no" / "page.html"
    for args, said in [
        (["report", pair / "fedavg-0x"], f"did you mean {pair / 'fedavg-0'}?"),
        (["report", tmp_path], "is not a run folder and holds none"),
        (["report", pair, "-o", no], "there is no folder"),
        (["report", pair, "-o", tmp_path], "is a folder"),
        (["watch", pair / "fedntd-7"], "did you mean"),
        (["demo", "-o", no], "there is no folder"),
        (["report"], "RUN..."),
        (["watch", pair, "--port", "70000"], "--port"),
    ]:
        monkeypatch.setattr(sys, "argv", ["fedkeep", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            app.main()
        told = capsys.readouterr().err
        assert ended.value.code == 2, args
        assert said in told
        assert told.count("\n") == 1 or "Usage" in told


def test_watch_serves_until_ctrl_c(pair: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "fedkeep", "watch", str(pair), "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell may have us ignore it
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    port = int(line.split("/")[2].split(":")[1])
    connection = http.client.HTTPConnection(HOST, port, timeout=30)
    connection.request("GET", "/data.json")
    assert json.loads(connection.getresponse().read())["groups"]
    connection.close()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors


# the terminal


def confusions(*rows: list[float]) -> list[dict]:
    return records([[0.0] * len(rows[0]), *rows])


def test_the_pulse_is_what_the_history_measures() -> None:
    lines = records(wave(1, rounds=9))
    pulse = RunProgress(rounds=4)
    for line in lines:
        pulse.update(line)
    whole = np.array([np.diag(line["confusion"]) / 20 for line in lines[1:]])
    assert pulse.lost is not None
    np.testing.assert_allclose(pulse.lost, whole[:-1].max(0) - whole[-1])
    assert pulse.line() == f"round 9: accuracy {whole[-1].mean():.3f}, forgetting {pulse.lost.mean():.3f}"
    assert len(pulse.recent) == 4


def test_the_pulse_shows_a_column_per_round_and_of_many_classes_those_that_lost_most() -> None:
    pulse = RunProgress()
    assert pulse.line() == "round 0: not evaluated yet"
    assert pulse.strip().plain == ""
    before, after = np.ones(30), np.ones(30)
    after[[3, 17]] = 0.0
    for line in confusions(before.tolist(), after.tolist()):
        pulse.update(line)
    rows = pulse.strip(most=2).plain.splitlines()
    assert [row.split()[1] for row in rows] == ["3", "17"]
    assert rows[0].endswith("█ ")
    pulse.update({"round": 3})  # not evaluated
    assert pulse.line().startswith("round 3: accuracy")


def finish(bar: progress.ProgressBar, lines: list[dict]) -> None:
    simulation = SimpleNamespace(history=SimpleNamespace(records=lines))
    bar.begin("fedavg")
    bar(simulation, lines[-1])


def test_a_terminal_shows_the_classes_while_a_run_goes_on() -> None:
    console = Console(force_terminal=True, file=io.StringIO(), width=80)
    with progress.ProgressBar(console, 4) as bar:
        finish(bar, records(wave(0)))  # resumed: what was before is taken in as well
        assert len(bar.pulse.recent) == 4
        bar.live.refresh()
    shown = console.file.getvalue()
    for part in ("fedavg", "accuracy", "forgetting", "class 2", "▇"):
        assert part in shown


def test_piped_a_long_run_says_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    bar = progress.ProgressBar(Console(file=io.StringIO()), 4)
    finish(bar, records(wave(0)))
    assert capsys.readouterr().err == ""
    bar.said -= progress.SILENCE
    finish(bar, records(wave(0)))
    assert capsys.readouterr().err.startswith("fedavg: round 4: accuracy 0.")


def test_the_demo_ends_with_its_page(tmp_path: Path) -> None:
    done = fedkeep("demo", "--seeds", "1", "--rounds", "2", cwd=tmp_path, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("The page: fedkeep-demo.html")
    assert [p.name for p in tmp_path.iterdir()] == ["fedkeep-demo.html"]  # the runs themselves are gone
    assert "One round, taken apart" in (tmp_path / "fedkeep-demo.html").read_text()
