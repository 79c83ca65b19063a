"""Multi-process JAX as the way in: its processes become the ranks of a ring."""

from __future__ import annotations

import subprocess
import sys

import jax
import pytest
from jax._src import distributed
from tcp_support import free_port, on_ranks

import ringrt
from ringrt import ConfigError, ExchangeTimeout, TransportError
from ringrt.errors import TransportUnavailable
from ringrt.transports.rendezvous_jax import JaxRendezvous
from ringrt.transports.tcp_wire import Deadline
from support import ROOT

pytestmark = pytest.mark.timeout(120)

PROGRAMS = ROOT / "tests" / "jax_programs"


def processes(program, size, *arguments, timeout=90):
    """Run a program in `size` processes, told the coordinator and their number; what each
    printed, and their exit codes."""
    coordinator = f"localhost:{free_port()}"
    started = [
        subprocess.Popen(
            [sys.executable, PROGRAMS / program, coordinator, str(rank), *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        said = [process.communicate(timeout=timeout) for process in started]
    finally:
        for process in started:
            process.kill()
    return said, [process.returncode for process in started]


def test_rings_of_numpy_and_jax_arrays_equal_the_oracle():
    said, codes = processes("ring.py", 2, 2)
    assert codes == [0, 0], said
    assert [out for out, _ in said] == ["rank 0 is right\n", "rank 1 is right\n"]


def test_a_killed_process_is_told_at_once():
    said, _ = processes("fault.py", 2, "killed")
    assert said[0][0].startswith("PeerLost: rank 1 failed: its connection "), said


def test_a_process_that_raises_tells_the_others_why():
    said, _ = processes("fault.py", 2, "raises")
    assert said[1][0] == "LookupError: planted\n", said
    assert said[0][0] == "PeerLost: rank 1 failed: LookupError: planted\n", said


def test_a_process_that_does_not_come_is_named():
    said, _ = processes("fault.py", 2, "does not come")
    assert said[0][0] == "ExchangeTimeout: rank 0 waited 1 s for rank 1 to join the ring\n", said


# Without other processes.


def test_before_it_is_initialised_it_is_refused():
    with pytest.raises(TransportUnavailable) as caught:
        ringrt.Ring.from_jax_distributed()
    assert "call jax.distributed.initialize() first" in str(caught.value)


@pytest.mark.parametrize("transport", ["mpi", "threads"])
def test_a_transport_of_another_kind_is_refused(transport):
    with pytest.raises(ConfigError) as caught:
        ringrt.Ring.from_jax_distributed(transport=transport)
    assert str(caught.value) == (
        f"transport: expected tcp, or one that works over it, got '{transport}'"
    )


def test_a_wrong_timeout_is_refused():
    with pytest.raises(ConfigError, match="timeout: expected a number of seconds > 0, got 0"):
        ringrt.Ring.from_jax_distributed(timeout=0)


def test_without_jax_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("ringrt.transports.rendezvous_jax.find_spec", lambda name: None)
    with pytest.raises(TransportUnavailable) as caught:
        JaxRendezvous()
    assert str(caught.value) == "JAX is not installed: pip install 'ringrt[jax]'"


class Service:
    """A coordination service in this process."""

    def __init__(self, swept):
        self.keys, self.swept = {}, swept

    def key_value_set_bytes(self, key, value):
        self.keys[key] = value

    def key_value_dir_get_bytes(self, prefix):
        return [(key, value) for key, value in self.keys.items() if key.startswith(prefix)]

    def key_value_delete(self, prefix):
        self.swept.append(prefix)

    def wait_at_barrier(self, name, milliseconds):
        assert milliseconds > 0


@pytest.fixture
def service(monkeypatch):
    service = Service([])
    known = {"client": service, "coordinator_address": "127.0.0.1:1"}
    for name, value in (known | {"process_id": 2, "num_processes": 4}).items():
        monkeypatch.setattr(distributed.global_state, name, value)
    return service


def seated(rank, size, keys="ringrt/test/"):
    rendezvous = JaxRendezvous()
    rendezvous.rank, rendezvous.size, rendezvous._keys = rank, size, keys
    return rendezvous


def test_every_ring_has_keys_of_its_own(service):
    first, second = JaxRendezvous(), JaxRendezvous()
    assert first._keys != second._keys
    assert first._keys.startswith("ringrt/")
    assert (first.rank, first.size, first.host) == (2, 4, "127.0.0.1")


def test_all_meet_in_the_store_and_sweep_it(service):
    def come(rank):
        return seated(rank, 12).all_gather(bytes([rank]), Deadline(10))

    assert on_ranks(12, come) == [[bytes([rank]) for rank in range(12)]] * 12
    assert service.swept == ["ringrt/test/"]


def test_who_is_not_in_the_store_is_named(service):
    with pytest.raises(ExchangeTimeout) as caught:
        seated(1, 4).all_gather(b"", Deadline(0.1))
    assert str(caught.value) == "rank 1 waited 0.1 s for ranks 0, 2, 3 to join the ring"


def test_an_error_of_the_service_is_ours(service, monkeypatch):
    def fail(key, value):
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: planted\nmore")

    monkeypatch.setattr(service, "key_value_set_bytes", fail)
    with pytest.raises(TransportError) as caught:
        seated(0, 2).all_gather(b"", Deadline(1))
    assert str(caught.value) == "JAX's coordination service: UNAVAILABLE: planted"


def test_another_jax_is_told_which_one_is_known(service, monkeypatch):
    monkeypatch.delattr(Service, "key_value_dir_get_bytes")
    with pytest.raises(TransportUnavailable) as caught:
        JaxRendezvous()
    assert str(caught.value) == (
        f"the coordination service of JAX {jax.__version__} is not the one that ringrt knows, of "
        "JAX 0.10.2: key_value_dir_get_bytes"
    )
    monkeypatch.delattr(distributed, "global_state")
    with pytest.raises(TransportUnavailable, match="has no attribute 'global_state'"):
        JaxRendezvous()


def test_ringrt_host_goes_before_the_coordinator_s_network(service, monkeypatch):
    monkeypatch.setenv("RINGRT_HOST", "127.0.0.7")
    assert JaxRendezvous().host == "127.0.0.7"


def test_a_coordinator_that_cannot_be_found_is_told(service, monkeypatch):
    monkeypatch.setattr(distributed.global_state, "coordinator_address", "host.invalid:1")
    with pytest.raises(TransportError) as caught:
        JaxRendezvous()
    assert str(caught.value).startswith("there is no way from here to host.invalid:1: ")
    assert "RINGRT_HOST" in str(caught.value)
