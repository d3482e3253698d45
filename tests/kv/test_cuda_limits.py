"""What there is to be had: machines and containers as files under a made-up root; memory nodes."""

from __future__ import annotations

import ctypes
import mmap

import pytest

from agentkv.kv import numa
from agentkv.kv.limits import available_bytes, default_host_bytes
from agentkv.units import GIB, KIB, MIB


def machine(root, *, available, cgroup=""):
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {available // KIB} kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    return root


def group(root, path, **files):
    """A control group's files; two underscores stand for a dot."""
    folder = root / "sys/fs/cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def v2(root, path, *, limit, used, cache=0, **more):
    stat = f"anon 5\nfile {cache}\nshmem 0\ninactive_file {cache // 4}\nactive_file {cache - cache // 4}"
    group(root, path, memory__max=limit, memory__current=used, memory__stat=stat, **more)


def test_without_a_container_it_is_what_the_kernel_calls_available(tmp_path):
    """And half of it is the default's bound; a smaller default stays."""
    root = machine(tmp_path, available=64 * GIB)
    assert 64 * GIB == available_bytes(root)
    assert 32 * GIB == default_host_bytes(100 * GIB, root=root)
    assert 4 * GIB == default_host_bytes(4 * GIB, root=root)


@pytest.mark.parametrize("path", ["/", "/pod/app"])
def test_a_version_2_container_of_2_gib_on_a_large_host_bounds_the_default(tmp_path, path):
    """Whatever part of it others use is gone, page cache excepted (K15)."""
    root = machine(tmp_path, available=500 * GIB, cgroup=f"0::{path}\n")
    v2(root, path.strip("/"), limit=2 * GIB, used=GIB + 512 * MIB, cache=GIB)
    assert GIB + 512 * MIB == available_bytes(root)
    assert 768 * MIB == default_host_bytes(64 * GIB, root=root)


def test_the_tightest_of_nested_groups_counts(tmp_path):
    """A roomy group inside of a tight one is tight; memory.high throttles and counts too."""
    root = machine(tmp_path, available=500 * GIB, cgroup="0::/a/b\n")
    v2(root, "a", limit=3 * GIB, used=GIB)
    v2(root, "a/b", limit="max", used=GIB, memory__high=8 * GIB)
    assert 2 * GIB == available_bytes(root)
    v2(root, "a/b", limit="max", used=GIB, memory__high=int(1.5 * GIB))
    assert 512 * MIB == available_bytes(root)


@pytest.mark.parametrize("path", ["/", "/docker/0123abcd"])
def test_a_version_1_container_bounds_it_too(tmp_path, path):
    """Also where the path is the host's name for what is mounted as the root here."""
    root = machine(tmp_path, available=500 * GIB, cgroup=f"9:cpu:/\n4:memory:{path}\n0::/\n")
    group(
        root,
        "memory",
        memory__limit_in_bytes=2 * GIB,
        memory__usage_in_bytes=GIB,
        memory__stat=f"cache {GIB}\ntotal_inactive_file {256 * MIB}\ntotal_active_file 0",
    )
    assert GIB + 256 * MIB == available_bytes(root)


def test_no_limit_is_no_bound(tmp_path):
    """In either version's spelling."""
    root = machine(tmp_path, available=3 * GIB, cgroup="4:memory:/\n0::/\n")
    group(root, "memory", memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=GIB)
    v2(root, "", limit="max", used=GIB)
    assert 3 * GIB == available_bytes(root)


def test_a_group_over_its_limit_has_nothing_left(tmp_path):
    """Not less than nothing."""
    root = machine(tmp_path, available=GIB, cgroup="0::/\n")
    v2(root, "", limit=MIB, used=2 * MIB)
    assert 0 == available_bytes(root)


def test_nonsense_in_these_files_is_no_bound(tmp_path):
    """A machine that we cannot read is taken for what the C library says."""
    root = machine(tmp_path, available=GIB, cgroup="nonsense\n0::/\n")
    (root / "proc/meminfo").write_text("MemAvailable: many kB\n")
    v2(root, "", limit="lots", used=2 * MIB)
    assert available_bytes(root) > 64 * MIB


def test_this_machine_has_memory():
    """The real files."""
    assert 64 * MIB < available_bytes() < 1 << 50


def test_the_node_of_a_device_is_read_from_its_folder(tmp_path):
    """None if it says -1, is not there, or there is but one node."""
    folder = tmp_path / "sys/bus/pci/devices/0000:3b:00.0"
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text("1\n")
    assert None is numa.node_of_pci("0000:3b:00.0", root=tmp_path)
    (tmp_path / "sys/devices/system/node/node1").mkdir(parents=True)
    assert 1 == numa.node_of_pci("0000:3b:00.0", root=tmp_path)
    assert None is numa.node_of_pci("0000:3c:00.0", root=tmp_path)
    (folder / "numa_node").write_text("-1\n")
    assert None is numa.node_of_pci("0000:3b:00.0", root=tmp_path)


def test_a_node_that_does_not_exist_is_refused_silently():
    """And the mapping works all the same; node 0 is everywhere, if the kernel lets us ask for it."""
    with mmap.mmap(-1, 1 << 20) as memory:
        first = ctypes.c_char.from_buffer(memory)
        address = ctypes.addressof(first)
        assert False is numa.prefer(address, 1 << 20, 63)
        assert False is numa.prefer(address, 1 << 20, -1)
        assert numa.prefer(address, 1 << 20, 0) in {True, False}
        memory[0] = 1
        assert 1 == memory[0]
        del first
