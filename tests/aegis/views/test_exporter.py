"""Metrics of runs, parsed by Prometheus' own parser."""

import contextlib
import http.client
import json
import math
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from small_runs import small_config, write_committed_step
from synthetic_runs import (
    DISTURBED,
    FINAL,
    HELD_OUT,
    KILLED,
    ROW,
    event,
    exported,
    parse,
    write_events,
    write_lines,
    write_rows,
)

from zaya_jax.aegis.agent.sightings import Sighting, write_sighting
from zaya_jax.aegis.supervisor.restart_policy import EXCLUDE
from zaya_jax.aegis.views.exporter import main, make_registry, serve
from zaya_jax.aegis.views.goodput import BUCKETS, PRODUCTIVE, measure
from zaya_jax.aegis.views.prometheus_samples import MAX_VALUES, METRICS
from zaya_jax.errors import INTERRUPTED, RESUMABLE
from zaya_jax.run_folder import tail
from zaya_jax.run_folder.names import (
    AT,
    BEGAN,
    CAUGHT_UP,
    DECIDED,
    EVENTS_FILE,
    METRICS_FILE,
    STALLED,
    STRAGGLING,
)
from zaya_jax.run_folder.tail import TailedEvents, TailedFile, newest_rows

PARTS = {"metrics", "events", "config", "checkpoints", "sightings"}


def readable(found):
    return {key[1] for key, value in found.items() if key[0] == "zaya_readable" and value == 1}


@pytest.fixture
def run(tmp_path):
    """A run with failures and a checkpoint."""
    folder = tmp_path / "run"
    decided = {"action": EXCLUDE, "reason": "ECC", "cost_seconds": 60.0, "nodes": ["n1", "n7"]}
    dry = [event(1151, DECIDED, 101, **decided, acted=False)]
    write_events(folder, [*DISTURBED, event(1150, DECIDED, 101, **decided, acted=True), *dry])
    for host in ("n1", "n1", "n7"):
        write_sighting(folder, Sighting(1149.0, host, "ecc_correctable", "note", "dmesg", "a line"))
    write_rows(folder)
    (folder / "config.json").write_text(small_config(run_folder=folder, corpus=folder / "corpus").to_text())
    write_committed_step(folder, 96)
    os.utime(folder / "checkpoints/96", (1345, 1345))
    return folder


def test_all_metrics_of_a_run(run):
    found = exported(run)
    assert readable(found) == PARTS
    expected = {
        ("zaya_step",): 100,
        ("zaya_planned_steps",): 30,
        ("zaya_loss_nats", "train"): 2.5,
        ("zaya_loss_nats", "validation"): 2.75,
        ("zaya_bits_per_byte", "train"): 1.25,
        ("zaya_bits_per_byte", "validation"): 1.375,
        ("zaya_learning_rate",): 3e-4,
        ("zaya_tokens_per_second",): 12422.2,
        ("zaya_model_flops_utilisation_ratio",): 0.41,
        ("zaya_gradient_norm",): 0.11,
        ("zaya_skipped_steps",): 2,
        ("zaya_dead_experts",): 1,
        ("zaya_largest_expert_load_ratio",): 2.7,
        ("zaya_running",): 0,
        ("zaya_attempts_total",): 3,
        ("zaya_ends_total", "killed"): 1,
        ("zaya_ends_total", "stalled"): 1,
        ("zaya_ends_total", "finished"): 1,
        ("zaya_ends_total", "failed"): 0,
        ("zaya_lost_steps_total",): 61,
        ("zaya_last_word_timestamp_seconds",): 1350,
        ("zaya_events_total", "began"): 3,
        ("zaya_events_total", "spiked"): 0,
        ("zaya_decisions_total", EXCLUDE): 1,
        ("zaya_decisions_total", "stop"): 0,
        ("zaya_node_decisions_total", EXCLUDE, "n7"): 1,
        ("zaya_sightings_total", "ecc_correctable", "n1"): 2,
        ("zaya_sightings_total", "ecc_correctable", "n7"): 1,
        ("zaya_checkpoint_step",): 96,
        ("zaya_checkpoint_timestamp_seconds",): 1345,
        ("zaya_checkpoint_interval_steps",): 4,
    }
    assert {key: found.get(key) for key in expected} == expected
    goodput = measure(DISTURBED)
    assert found[("zaya_goodput_ratio",)] == goodput.share
    assert {b: found[("zaya_time_seconds", b)] for b in BUCKETS} == dict(goodput.seconds)


def test_stragglers_until_they_have_caught_up(tmp_path):
    slow = {"process": 2, "host": "n2", "device": None, "section": "read", "share": 0.12}
    begin, end = event(1310, STRAGGLING, 90, **slow), event(1320, CAUGHT_UP, 96, **slow)
    write_events(tmp_path, [FINAL[0], begin])
    labels = "", "n2", "2", "read"  # in the order of their names
    assert exported(tmp_path)["zaya_straggler_ratio", *labels] == 0.12
    write_events(tmp_path, [end])
    found = exported(tmp_path)
    assert ("zaya_straggler_ratio", *labels) not in found
    assert found["zaya_events_total", STRAGGLING] == found["zaya_events_total", CAUGHT_UP] == 1


def test_names_and_help_texts_are_valid():
    for name, metric in METRICS.items():
        assert name.startswith("zaya_")
        assert not {"run", "le"} & set(metric.labels)
        assert metric.meaning.endswith(".")


def test_a_run_that_has_not_begun(tmp_path):
    found = exported(tmp_path / "nowhere")
    assert readable(found) == PARTS - {"config"}
    assert found[("zaya_attempts_total",)] == 0
    assert ("zaya_goodput_ratio",) not in found


@pytest.mark.parametrize(
    "content", [b"", b'{"time": 17, "eve', b"\x00\xff\n[[[[\n{}\n", b'{"step": 1}\n' * 3]
)
def test_damaged_files_do_not_hide_others(run, content):
    for name in (EVENTS_FILE, METRICS_FILE, "config.json"):
        before = (run / name).read_bytes()
        (run / name).write_bytes(content)
        found = exported(run)
        assert found[("zaya_checkpoint_step",)] == 96
        (run / name).write_bytes(before)
    (run / METRICS_FILE).unlink()
    (run / METRICS_FILE).mkdir()
    assert readable(exported(run)) == PARTS - {"metrics"}


def test_values_that_are_not_finite_or_not_numbers(tmp_path):
    write_rows(tmp_path, [ROW | {"loss": math.nan, "gradient_norm": math.inf, "learning_rate": "1e-3"}])
    found = exported(tmp_path)
    assert math.isnan(found[("zaya_loss_nats", "train")])
    assert found[("zaya_gradient_norm",)] == math.inf
    assert ("zaya_learning_rate",) not in found


def test_the_number_of_label_values_is_limited(tmp_path):
    hostile = [event(i, f'"{i}"\n\\{{}} é' + "x" * 500, 1) for i in range(3 * MAX_VALUES)]
    decided = [event(i, DECIDED, 1, action=[i], nodes={"a": 1}) for i in range(3)]
    write_events(tmp_path, hostile + decided + DISTURBED)
    found = exported(tmp_path)
    assert sum(key[0] == "zaya_events_total" for key in found) == MAX_VALUES
    assert found[("zaya_events_total", "spiked")] == 0
    assert found[("zaya_decisions_total", "[2]")] == 1


def test_new_lines_are_read_once(run, monkeypatch):
    registry = make_registry([run])

    def now():
        return parse(generate_latest(registry).decode())

    assert now()[("zaya_attempts_total",)] == 3
    parsed = []
    monkeypatch.setattr(tail, "parse_event", lambda line: parsed.append(line) or json.loads(line))
    with (run / EVENTS_FILE).open("a") as file:
        file.write(json.dumps(event(1400, BEGAN, 96, seconds={"start": 5.0})) + '\n{"time": 14')
    assert now()[("zaya_attempts_total",)] == 4
    assert len(parsed) == 1
    with (run / EVENTS_FILE).open("a") as file:
        file.write('10, "event": "spiked"}\n')
    assert now()[("zaya_events_total", "spiked")] == 1
    assert len(parsed) == 2


def test_a_replaced_file_is_read_from_its_beginning(run):
    events = TailedEvents(run)
    assert len(events.read()) == len(DISTURBED) + 1  # of two words on where it is the newer one
    (run / EVENTS_FILE).unlink()
    assert len(events.read()) == len(DISTURBED) + 1  # of two words on where it is the newer one
    write_events(run, KILLED[:1])
    assert events.read() == KILLED[:1]
    assert events.counts == {BEGAN: 1}


def test_the_newest_progress_reports_are_kept(tmp_path):
    words = [event(1130 + i, AT, 101 + i, seconds=KILLED[-1]["seconds"]) for i in range(100)]
    write_events(tmp_path, KILLED + words + FINAL)
    events = TailedEvents(tmp_path)
    assert len(events.read()) == 4
    assert events.counts[AT] == 102
    assert measure(events.read()) == measure(KILLED + words + FINAL)


def test_only_the_end_of_a_long_file_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(tail, "TAIL_BYTES", 4096)
    write_rows(tmp_path, [HELD_OUT, *({**ROW, "step": step} for step in range(1000))])
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"step": 1000, "kind": "tr')
    assert newest_rows(tmp_path) == {"train": {**ROW, "step": 999}}
    lines = TailedFile(tmp_path / METRICS_FILE).new_lines()
    assert sum(1 for _ in lines) == 1001


def test_files_are_served_while_they_are_written(run):
    """A writer appends parts of lines during two concurrent scrapes."""
    registry, done, failures = make_registry([run]), threading.Event(), []

    def write():
        number = 0
        while not done.is_set():
            number += 1
            line = json.dumps(event(1400 + number, AT, number, seconds={"start": 1.0})) + "\n"
            for part in (line[:20], line[20:]):
                with (run / EVENTS_FILE).open("a") as file:
                    file.write(part)
            write_lines(run / METRICS_FILE, [ROW | {"step": number}])

    def scrape():
        for _ in range(4):
            try:
                failures.extend(PARTS - readable(parse(generate_latest(registry).decode())))
            except Exception as error:
                failures.append(error)

    threads = [threading.Thread(target=scrape) for _ in range(2)]
    writer = threading.Thread(target=write)
    for thread in (writer, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    writer.join()
    assert failures == []


def test_metrics_are_served_on_the_loopback(run, capsys):
    serve(make_registry([run]), "127.0.0.1", 0)
    address = capsys.readouterr().out.split()[-1]
    assert address.startswith("http://127.0.0.1:")
    with urllib.request.urlopen(address) as answer:
        assert answer.status == 200
        found = parse(answer.read().decode())
    assert found[("zaya_step",)] == 100
    taken = int(address.split(":")[-1].split("/")[0])
    with pytest.raises(ValueError, match=rf"cannot listen on 127.0.0.1:{taken} \(Address already in use\)"):
        serve(make_registry([run]), "127.0.0.1", taken)
    with pytest.raises(ValueError, match="--port is 70000; it must be 0 to 65535"):
        serve(make_registry([run]), "127.0.0.1", 70000)


def status_of(address, host):
    """Returns the status of a request with a Host header, or without one."""
    connection = http.client.HTTPConnection(address, timeout=30)
    connection.putrequest("GET", "/metrics", skip_host=True)
    if host is not None:
        connection.putheader("Host", host)
    connection.endheaders()
    with contextlib.closing(connection):
        return connection.getresponse().status


@pytest.mark.parametrize(
    ("listening", "allowed", "hosts"),
    [
        (
            "127.0.0.1",
            [],
            {"127.0.0.1": 200, "localhost:9464": 200, "[::1]:80": 200, "evil.example": 403, "[::1]evil": 403}
            | {"localhost@evil.example": 403, "10.0.0.7:9464": 403, "127.0.0.1.evil.example": 403, "": 403}
            | {"node7": 403, None: 403},
        ),
        (
            # On all interfaces a scraper asks by an address or a name of this machine.
            "0.0.0.0",
            ["Zaya.Monitoring.svc"],
            {"10.0.0.7:9464": 200, "[fd00::7]:9464": 200, "zaya.monitoring.svc:9464": 200, "localhost": 200}
            | {
                socket.gethostname(): 200,
                "evil.example": 403,
                "[::1]evil": 403,
                "10.0.0.7.evil.example": 403,
            },
        ),
    ],
)
def test_host_headers_of_other_sites_are_rejected(run, capsys, listening, allowed, hosts):
    serve(make_registry([run]), listening, 0, allowed_hosts=allowed)
    port = capsys.readouterr().out.rpartition(":")[2].split("/")[0]
    assert {host: status_of(f"127.0.0.1:{port}", host) for host in hosts} == hosts


@pytest.mark.parametrize("name", ["node1:9464", "http://node1", "*", ""])
def test_invalid_host_names_are_rejected(run, name):
    with pytest.raises(ValueError, match="it must be a name without a port"):
        serve(make_registry([run]), "127.0.0.1", 0, allowed_hosts=[name])


def test_a_file_for_node_exporter_is_written(run, tmp_path):
    main([str(run), f"--textfile={tmp_path / 'zaya.prom'}"])
    found = parse((tmp_path / "zaya.prom").read_text())
    assert found[("zaya_time_seconds", PRODUCTIVE)] > 0
    assert found[("zaya_ends_total", STALLED)] == 1
    assert [path.name for path in tmp_path.glob("zaya.prom*")] == ["zaya.prom"]


def test_several_runs_have_labels(run, tmp_path):
    other = tmp_path / "other"
    write_rows(other, [ROW | {"step": 7}])
    text = generate_latest(make_registry([run, other])).decode()
    (family,) = [each for each in text_string_to_metric_families(text) if each.name == "zaya_step"]
    assert {sample.labels["run"]: sample.value for sample in family.samples} == {str(run): 100, str(other): 7}
    with pytest.raises(ValueError, match="is listed 2 times"):
        make_registry([run, other, pathlib.Path(str(run))])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, INTERRUPTED), (signal.SIGTERM, RESUMABLE)])
def test_the_server_ends_at_a_signal(run, number, code):
    words = [sys.executable, "-m", "zaya_jax.cli", "aegis", "metrics", str(run), "--port=0"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert _ends_at(process, number) == code


def test_ctrl_c_ends_a_server_that_a_script_started_in_the_background(run):
    """A shell script starts such commands with SIGINT ignored; the exit code was 0."""
    server = f"'{sys.executable}' -m zaya_jax.cli aegis metrics '{run}' --port=0"
    words = ["sh", "-c", f"trap '' INT; exec {server}"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert _ends_at(process, signal.SIGINT) == INTERRUPTED


def test_a_signal_that_another_thread_receives_ends_the_server(run):
    """As a thread of a library may, if the signal arrives just before the main thread waits for it."""
    script = """
import signal, sys, threading
from zaya_jax import cli

def interrupt():
    sys.stdin.readline()
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)

threading.Thread(target=interrupt, daemon=True).start()
cli.main(sys.argv[1:])
"""
    words = [sys.executable, "-c", script, "aegis", "metrics", str(run), "--port=0"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(words, text=True, **pipes) as process:
        try:
            assert "/metrics" in process.stdout.readline()
            time.sleep(0.3)  # until the main thread waits
            _, complaint = process.communicate("\n", timeout=60)
        finally:
            process.kill()
    assert process.returncode == INTERRUPTED, complaint


def _ends_at(process, number):
    """Sends a signal to a server that serves; returns its exit code."""
    assert "/metrics" in process.stdout.readline()
    process.send_signal(number)
    _, complaint = process.communicate(timeout=60)
    assert "Traceback" not in complaint
    return process.returncode
