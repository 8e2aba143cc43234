from __future__ import annotations

import socket

import pytest
import torch.distributed as dist

from gradwire.core.errors import OptionError
from gradwire.net.address import (
    LOOPBACK,
    address_toward,
    interface_address,
    is_loopback,
    local_address,
    loopback_id,
    parse_address,
    parse_addresses,
    resolve,
    store_host,
)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)


def test_the_host_comes_from_the_store_through_its_wrappings():
    tcp = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert store_host(tcp) == "127.0.0.1"
    assert store_host(dist.PrefixStore("a", dist.PrefixStore("b", tcp))) == "127.0.0.1"


def test_a_store_without_a_host_leaves_it_to_the_environment(monkeypatch):
    assert store_host(dist.HashStore()) is None
    assert local_address(dist.HashStore()) == LOOPBACK
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert is_loopback(local_address(dist.HashStore()))


def test_it_is_never_all_addresses(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", socket.gethostname())
    assert local_address(dist.HashStore()) not in ("0.0.0.0", "::")


def test_the_interface_of_gloo_is_respected(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuchinterface0,lo")
    assert local_address(dist.HashStore()) == LOOPBACK


def test_an_unknown_interface_lists_the_known_ones():
    with pytest.raises(OptionError, match=r"GLOO_SOCKET_IFNAME=nosuch0 has an address. Known interfaces: .*lo"):
        interface_address(["nosuch0"])


def test_a_host_without_a_route_says_what_to_set():
    with pytest.raises(OptionError, match="Set GLOO_SOCKET_IFNAME"):
        address_toward("no-such-host.invalid")


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.1.1", "127.1", "::1", "::ffff:127.0.0.1", "localhost", "Localhost"]
)
def test_loopback_is_known(host):
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host",
    ["10.0.0.1", "0.0.0.0", "::", "fe80::1%lo", "::ffff:10.0.0.1", "127.evil.example", "localhost.evil.example", "",
     "a" * 300],
)  # fmt: skip
def test_what_others_can_reach_or_name_is_no_loopback(host):
    assert not is_loopback(host)


def test_an_address_has_a_host_and_a_port():
    assert parse_address("a.example:7070") == ("a.example", 7070)
    assert parse_address("[::1]:65535") == ("::1", 65535)
    for said in ("a.example", ":7070", "a.example:", "a.example:http", "a.example:-1", "a.example:\xb2"):
        with pytest.raises(OptionError, match="as host:port"):
            parse_address(said)
    for port in (0, 65536, 99999):
        with pytest.raises(OptionError, match=f"no port {port}.* from 1 to 65535"):
            parse_address(f"a.example:{port}")


def test_addresses_are_a_text_or_a_sequence():
    for given in ("a.example:1, [::1]:2,", ["a.example:1", "[::1]:2 "]):
        assert parse_addresses(given) == [("a.example", 1), ("::1", 2)]
    assert parse_addresses("") == []


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a..b", "a" * 300])
def test_a_host_without_an_address_is_refused(host):
    with pytest.raises(OptionError, match="no address of"):
        resolve(host)


def test_processes_of_one_machine_are_in_one_place():
    assert loopback_id() == loopback_id()
    assert socket.gethostname() in loopback_id()
