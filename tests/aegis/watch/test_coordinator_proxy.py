"""The proxy between a process and the coordinator: what it forwards, drops and damages."""

import contextlib
import socket

import pytest

from zaya_jax.aegis.watch.coordinator_proxy import DAMAGE, FORWARD, PARTITION, CoordinatorProxy
from zaya_jax.aegis.watch.fault_injection import parse_faults, place_proxy
from zaya_jax.parallel.processes.process_group import ProcessGroup


def test_messages_are_forwarded_damaged_and_dropped():
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        proxy = CoordinatorProxy(f"127.0.0.1:{server.getsockname()[1]}")
        host, port = proxy.address.split(":")
        near = stack.enter_context(socket.create_connection((host, int(port)), timeout=10))
        far, _ = server.accept()
        stack.enter_context(far)
        for source, target in ((near, far), (far, near)):
            target.settimeout(10)
            proxy.mode = FORWARD
            source.sendall(b"hello")
            assert target.recv(10) == b"hello"
            proxy.mode = DAMAGE
            source.sendall(b"hello")
            assert target.recv(10) == b"hemlo"
            proxy.mode = PARTITION
            source.sendall(b"hello")
            target.settimeout(0.3)
            with pytest.raises(TimeoutError):
                target.recv(10)
        proxy.mode = FORWARD
        near.shutdown(socket.SHUT_WR)
        far.settimeout(10)
        assert far.recv(10) == b""


def test_only_the_process_with_a_network_fault_has_a_proxy():
    faults = parse_faults("partition@step=3:process=2,kill@step=5")
    groups = [ProcessGroup("127.0.0.1:7", 4, number) for number in range(4)]
    placed = [place_proxy(faults, group) for group in groups]
    assert [proxy is not None for _, proxy in placed] == [False, False, True, False]
    assert placed[0][0] == groups[0]
    assert placed[2][0] == ProcessGroup(placed[2][1].address, 4, 2)
    assert place_proxy(faults, None) == (None, None)


@pytest.mark.parametrize("word", ["damage@step=3:process=0", "partition@step=3"])
def test_the_coordinator_cannot_be_cut_off_from_itself(word):
    with pytest.raises(ValueError, match="where the coordinator is"):
        place_proxy(parse_faults(word), None)
