# SPDX-License-Identifier: Apache-2.0
"""States on disk: the very bits come back, any other file is refused and changes nothing, no crash breaks a file."""

import json
import os
import signal
import stat
import struct
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import same_bits

from kda_cupy import OperandError, SlotError, StatePool
from kda_cupy.pool import files, tensor_file

ROOT = Path(__file__).parents[2]
HV, V, K, H = 2, 3, 8, 1


def make_pool(capacity=5, *, used=3, seed=0, **changes):
    """A pool whose every bit is random, NaN included; the first slots are in use."""
    options = {"layers": 2, "num_key_heads": H, "activation_dtype": "bfloat16", "device": "cpu"} | changes
    pool = StatePool(capacity, HV, options.pop("K", K), options.pop("V", V), **options)
    pool.allocate(min(used, capacity))
    rng = np.random.default_rng(seed)
    for array in (pool.state, pool.conv):
        if array is not None:
            bits = rng.integers(0, 1 << 8 * array.itemsize, array.shape, np.uint64)
            array[:, 1:] = bits.astype(f"u{array.itemsize}").view(array.dtype)[:, 1:]
    return pool


def everything(pool):
    """All that a call may change."""
    arrays = [array.tobytes() for array in (pool.state, pool.conv) if array is not None]
    return arrays, list(pool._ledger._free), set(pool._ledger._in_use)


def same_slots(pool, slots, other, others):
    pairs = [(pool.state, other.state)] + ([] if pool.conv is None else [(pool.conv, other.conv)])
    return all(same_bits(mine[:, slots], theirs[:, others]) for mine, theirs in pairs)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "states.safetensors"


def refused(pool, path, *slots):
    """The reason that the message gives."""
    before = everything(pool)
    with pytest.raises(OperandError) as caught:
        pool.load(path, *slots)
    assert caught.value.code == "KDA-POOL-FILE"
    assert str(path) in str(caught.value)
    assert everything(pool) == before
    return caught.value.got


# Round trips


@pytest.mark.parametrize("conv", [None, "bfloat16", "float16", "float32"])
@pytest.mark.parametrize("layers", [1, 3])
def test_the_very_bits_come_back_under_the_same_numbers(path, conv, layers):
    pool = make_pool(layers=layers, activation_dtype=conv)
    pool.save(path)
    other = StatePool(9, HV, K, V, layers=layers, num_key_heads=H, activation_dtype=conv, device="cpu")
    assert other.load(path).tolist() == [1, 2, 3]
    assert same_slots(pool, [1, 2, 3], other, [1, 2, 3])
    assert other.slots_in_use.tolist() == [1, 2, 3]
    assert not other.state[:, [0, *range(4, 10)]].any()
    assert sorted(other.allocate(6).tolist()) == [4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("slots", [[3], [3, 1], [2, 3, 1], np.array([1, 3]), []], ids=str)
def test_some_slots_in_their_order(path, slots):
    pool = make_pool()
    pool.save(path, slots)
    other = make_pool(seed=1)
    targets = [2, 1, 3][: len(slots)]
    before = everything(other)
    assert other.load(path, targets).tolist() == targets
    assert same_slots(pool, list(slots), other, targets)
    other.state[:, targets] = make_pool(seed=1).state[:, targets]
    other.conv[:, targets] = make_pool(seed=1).conv[:, targets]
    assert everything(other) == before  # nothing else had changed


def test_an_int_is_one_slot(path):
    pool = make_pool()
    pool.save(path, 2)
    pool.load(path, 3)
    assert same_slots(pool, [2], pool, [3])


def test_pieces_are_written_in_the_right_place(path, monkeypatch):
    """A file is written and read in pieces; here of two slots, of one, and of less than one."""
    pool = make_pool(9, used=9, layers=3)
    slots = [4, 5, 6, 7, 8, 2, 1, 9]
    whole = []
    for size in (10**9, 2 * HV * V * K * 4 + 1, HV * V * K * 4, 1):
        monkeypatch.setattr("kda_cupy.pool.contents.PIECE_BYTES", size)
        pool.save(path, slots)
        whole.append(path.read_bytes())
        other = StatePool(9, HV, K, V, layers=3, num_key_heads=H, activation_dtype="bfloat16", device="cpu")
        assert other.load(path).tolist() == slots
        assert same_slots(pool, slots, other, slots)
    assert len(set(whole)) == 1


def test_a_wrapped_pool_with_padded_slots_saves_the_same_file(path, tmp_path):
    pool = make_pool(activation_dtype=None, layers=1)
    raw = np.zeros((6, HV * V * K + 4), np.float32)
    theirs = raw[:, : HV * V * K].reshape(6, HV, V, K, copy=False)
    theirs[...] = pool[0]
    wrapped = StatePool.wrap(theirs)
    wrapped.allocate(3)
    theirs[...] = pool[0]
    pool.save(path)
    wrapped.save(tmp_path / "wrapped")
    assert path.read_bytes() == (tmp_path / "wrapped").read_bytes()


def test_what_is_wrong_with_the_slots_is_said_before_a_file_is_touched(path):
    pool = make_pool()
    path.write_text("mine")
    for slots in ([1, 4], [0], [-1], [6], [1, 1]):
        with pytest.raises(SlotError):
            pool.save(path, slots)
        with pytest.raises(SlotError):
            pool.load(path, slots)
    assert path.read_text() == "mine"


def test_a_number_that_is_not_free_is_not_overwritten(path):
    pool = make_pool()
    pool.save(path, [2, 3])
    other = make_pool(seed=1)
    other.release([2])
    before = everything(other)
    with pytest.raises(SlotError) as caught:
        other.load(path)
    assert caught.value.code == "KDA-POOL-NOT-FREE"
    assert everything(other) == before
    small = make_pool(2)
    small.release([1, 2])
    with pytest.raises(SlotError) as caught:
        small.load(path)  # slot 3 is not there
    assert caught.value.code == "KDA-VALUE-SLOT-RANGE"
    assert small.free_slots == 2


def test_a_failure_while_writing_to_the_pool_takes_no_slots(path, monkeypatch):
    pool = make_pool()
    pool.save(path)
    other = StatePool(5, HV, K, V, layers=2, num_key_heads=H, activation_dtype="bfloat16", device="cpu")

    def fail(host):
        raise MemoryError

    monkeypatch.setattr(files, "_stage", lambda *_: fail)
    with pytest.raises(MemoryError):
        other.load(path)
    assert other.free_slots == 5


# The format


def test_the_safetensors_library_reads_it(path):
    safetensors = pytest.importorskip("safetensors")
    pool = make_pool()
    pool.save(path, [3, 1])
    with safetensors.safe_open(path, framework="numpy") as file:
        assert set(file.keys()) == {"state", "conv"}
        assert json.loads(file.metadata()["slots"]) == [3, 1]
        assert file.metadata()["format"] == "kda_cupy.StatePool"
        assert same_bits(file.get_tensor("state"), pool.state[:, [3, 1]])
        assert same_bits(file.get_tensor("conv"), pool.conv[:, [3, 1]])


def test_a_file_of_the_safetensors_library_with_the_same_metadata_is_read(path):
    numpy = pytest.importorskip("safetensors.numpy")
    pool = make_pool()
    pool.save(path)
    header, _ = split(path.read_bytes())
    arrays = {"conv": pool.conv[:, [1, 2, 3]], "state": pool.state[:, [1, 2, 3]]}
    path.write_bytes(
        numpy.save({k: np.ascontiguousarray(v) for k, v in arrays.items()}, header["__metadata__"])
    )
    other = make_pool(seed=1)
    other.load(path, [1, 2, 3])
    assert same_slots(pool, [1, 2, 3], other, [1, 2, 3])


def test_a_file_of_model_weights_is_foreign(path):
    numpy = pytest.importorskip("safetensors.numpy")
    numpy.save_file({"state": np.zeros((2, 3, HV, V, K), np.float32)}, path)
    assert "format" in refused(make_pool(), path)


def test_the_bytes_are_those_of_the_format(path):
    pool = make_pool(layers=1, activation_dtype=None)
    pool.save(path, [2])
    whole = path.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    assert length % 8 == 0
    header = json.loads(whole[8 : 8 + length])
    assert header["state"] == {
        "dtype": "F32",
        "shape": [1, 1, HV, V, K],
        "data_offsets": [0, HV * V * K * 4],
    }
    assert header["__metadata__"]["version"] == "1"
    assert json.loads(header["__metadata__"]["geometry"]) == {"layers": 1, "HV": HV, "V": V, "K": K}
    assert "rows are values, columns are keys" in header["__metadata__"]["layout"]
    assert whole[8 + length :] == pool.state[:, 2].tobytes()


# Files that do not fit


def split(whole):
    (length,) = struct.unpack("<Q", whole[:8])
    return json.loads(whole[8 : 8 + length]), whole[8 + length :]


def join(header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": 1},
        {"layers": 3},
        {"K": 12},
        {"V": 4},
        {"V": 8, "K": 3 * 4},
        {"num_key_heads": 2},
        {"activation_dtype": None},
        {"activation_dtype": "float16"},
        {"activation_dtype": "float32"},
    ],
    ids=str,
)
def test_another_geometry_is_refused(path, changes):
    make_pool().save(path)
    assert refused(make_pool(**changes), path)
    make_pool(**changes).save(path)
    assert refused(make_pool(), path)


def test_values_and_keys_swapped_are_another_geometry(path):
    """The number of bytes is the same."""
    make_pool(V=8, K=4, activation_dtype=None).save(path)
    assert "geometry" in refused(make_pool(V=4, K=8, activation_dtype=None), path)


def test_another_number_of_slots_is_refused(path):
    pool = make_pool()
    pool.save(path)
    assert refused(pool, path, [1, 2]) == "3 saved slots for 2 slots of the pool"
    assert refused(pool, path, []) == "3 saved slots for 0 slots of the pool"


def test_every_cut_is_refused(path):
    pool = make_pool(1, layers=1, activation_dtype="bfloat16")
    pool.save(path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        refused(pool, path, [1])
    for more in (b"\0", whole):
        path.write_bytes(whole + more)
        refused(pool, path, [1])
    path.write_bytes(whole)
    pool.load(path, [1])


def test_a_file_that_is_cut_while_it_is_read(path, monkeypatch):
    """The size was right when it was looked at."""
    pool = make_pool()
    pool.save(path)

    def cut_then_read(file, entry):
        os.truncate(path, path.stat().st_size - 1)
        return tensor_file.read_exactly(file, entry)

    monkeypatch.setattr(files, "read_exactly", cut_then_read)
    assert refused(pool, path, [1, 2, 3]) == "a file that was cut while it was read"


def header_changes():
    """Headers that lie, by what they lie about."""
    huge = 2**62

    def change(**fields):
        return lambda header: {**header, "state": {**header["state"], **fields}}

    def metadata(**fields):
        return lambda header: {**header, "__metadata__": {**header["__metadata__"], **fields}}

    def without(*names):
        return lambda header: {name: value for name, value in header.items() if name not in names}

    return {
        "bytes past the end": change(data_offsets=[0, huge]),
        "bytes before the beginning": change(data_offsets=[-8, 0]),
        "end before beginning": change(data_offsets=[8, 0]),
        "overlapping tensors": lambda header: {
            **header,
            "conv": {**header["conv"], "data_offsets": [0, 792]},
        },
        "a hole": lambda header: {
            **header,
            "conv": {**header["conv"], "data_offsets": [n + 8 for n in header["conv"]["data_offsets"]]},
        },
        "a shape of 2**62": change(shape=[huge, 2, 2, 3, 8]),
        "a shape whose product overflows 64 bits": change(shape=[2**33, 2**33, 0, 3, 8]),
        "a shape whose product is right modulo 2**64": change(shape=[2**32, 2**32, 2**32, 3, 8]),
        "a shape of one number": change(shape=[288]),
        "a shape of floats": change(shape=[2.0, 3, 2, 3, 8]),
        "a shape of bools": change(shape=[True, 3, 2, 3, 8]),
        "a shape of texts": change(shape=["2", 3, 2, 3, 8]),
        "a shape with a million axes": change(shape=[1] * 1_000_000),
        "a shape that is no list": change(shape=288),
        "V and K swapped": change(shape=[2, 3, 2, 8, 3]),
        "more slots": change(shape=[2, 4, 2, 3, 8]),
        "offsets of three": change(data_offsets=[0, 1152, 1152]),
        "offsets that are none": change(data_offsets=None),
        "another dtype of that size": change(dtype="I32"),
        "an unknown dtype": change(dtype="F4"),
        "a dtype that is no text": change(dtype=["F32"]),
        "a dtype that is another object": change(dtype={"F32": 1}),
        "one key more": change(extra=1),
        "a tensor that is a number": lambda header: {**header, "state": 3},
        "a tensor more": lambda header: {
            **header,
            "other": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]},
        },
        "a tensor less": without("conv"),
        "no tensors": without("conv", "state"),
        "no metadata": without("__metadata__"),
        "metadata that are a list": lambda header: {**header, "__metadata__": []},
        "metadata with numbers": metadata(version=1),
        "another format": metadata(format="pt"),
        "a newer version": metadata(version="2"),
        "another layout": metadata(layout='{"state": "layers, slots, HV, K, V"}'),
        "another geometry": metadata(geometry='{"layers": 2, "HV": 2, "V": 8, "K": 3, "H": 1}'),
        "slots that are no JSON": metadata(slots="1, 2, 3"),
        "slots that are nested": metadata(slots="[" * 100_000),
        "slots that are texts": metadata(slots='["1", "2", "3"]'),
        "slots that are bools": metadata(slots="[true, 2, 3]"),
        "slots that are floats": metadata(slots="[1.0, 2, 3]"),
        "slot 0": metadata(slots="[0, 1, 2]"),
        "slot -1": metadata(slots="[-1, 1, 2]"),
        "a slot of 100 digits": metadata(slots=f"[{10**100}, 1, 2]"),
        "a slot of 10,000 digits": metadata(slots=f"[1{'0' * 10_000}, 1, 2]"),
        "a slot twice": metadata(slots="[1, 2, 1]"),
        "too few slots": metadata(slots="[1, 2]"),
        "too many slots": metadata(slots="[1, 2, 3, 4]"),
        "a million slots": metadata(slots=str(list(range(1, 1_000_001)))),
        "a list": lambda header: [header],
        "null": lambda header: None,
        "text that is no JSON": lambda header: b"hello world",
        "nothing": lambda header: b"",
        "no UTF-8": lambda header: b"\xff\xfe" * 8,
        "nesting": lambda header: b'{"a":' * 200_000,
        "a key twice, the last one right": lambda header: b'{"conv": 1, ' + json.dumps(header).encode()[1:],
        "a number of a million digits": lambda header: b'{"a": 1' + b"0" * 1_000_000 + b"}",
        "infinity": lambda header: b'{"a": 1e999}',
    }


@pytest.mark.parametrize("change", header_changes().values(), ids=header_changes())
def test_headers_that_lie_are_refused(path, change):
    pool = make_pool()
    pool.save(path)
    header, data = split(path.read_bytes())
    path.write_bytes(join(header, data))  # the test's own way to write a file is right
    pool.load(path, [1, 2, 3])
    path.write_bytes(join(change(header), data))
    refused(pool, path, [1, 2, 3])
    refused(
        StatePool(5, HV, K, V, layers=2, num_key_heads=H, activation_dtype="bfloat16", device="cpu"), path
    )


@pytest.mark.parametrize("length", [0, 1, 2**31, 2**32, 2**63, 2**64 - 1, 2**64 - 8])
def test_a_header_length_that_lies_allocates_nothing(path, length):
    pool = make_pool()
    pool.save(path)
    path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])
    refused(pool, path, [1, 2, 3])


def test_a_huge_file_that_promises_to_fit_is_refused_by_its_numbers(path):
    """A sparse file of 8 TB whose header is consistent: memory is taken only for what the pool can hold."""
    pool = make_pool(activation_dtype=None)
    pool.save(path)
    header, _ = split(path.read_bytes())
    n = 2**33
    size = 2 * n * HV * V * K * 4
    header["state"] |= {"shape": [2, n, HV, V, K], "data_offsets": [0, size]}
    text = join(header, b"")
    path.write_bytes(text)
    try:
        os.truncate(path, len(text) + size)
    except OSError:
        pytest.skip("this file system has no sparse files of that size")
    refused(pool, path, [1, 2, 3])
    n = 100_000
    size = 2 * n * HV * V * K * 4
    header["state"] |= {"shape": [2, n, HV, V, K], "data_offsets": [0, size]}
    header["__metadata__"]["slots"] = json.dumps(list(range(1, n + 1)))
    text = join(header, b"")
    path.write_bytes(text)
    os.truncate(path, len(text) + size)
    new = StatePool(5, HV, K, V, layers=2, device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "read_exactly", lambda *_: pytest.fail("the data were read"))
        with pytest.raises(SlotError):
            new.load(path)
    assert new.free_slots == 5


@given(data=st.data())
def test_damage_is_refused_or_harmless(data, tmp_path_factory):
    """Bytes of the header changed at random: the pool is as it was, or holds what the file says."""
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    pool = make_pool(2, layers=1)
    pool.save(path)
    whole = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", whole[:8])
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, 7 + length))] = data.draw(st.integers(0, 255))
    path.write_bytes(whole)
    before = everything(pool)
    try:
        pool.load(path, [1, 2])
    except OperandError as refusal:
        assert refusal.code == "KDA-POOL-FILE"
        assert everything(pool) == before
    else:
        assert everything(pool) == before  # the data were left alone, and are the pool's own


def test_what_is_no_file(tmp_path):
    pool = make_pool()
    with pytest.raises(FileNotFoundError):
        pool.load(tmp_path / "nothing")
    with pytest.raises(IsADirectoryError):
        pool.load(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert refused(pool, tmp_path / "pipe", [1, 2, 3]) == "no regular file"  # and does not wait for a writer
    assert refused(pool, Path("/dev/zero"), [1, 2, 3]) == "no regular file"
    (tmp_path / "empty").touch()
    assert refused(pool, tmp_path / "empty", [1, 2, 3]) == "0 bytes, too few for a header"


# Replacing a file


def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(path, monkeypatch):
    pool = make_pool()
    pool.save(path)
    old = path.read_bytes()
    for name in ("fsync", "fchmod"):
        with monkeypatch.context() as patch:

            def fail(*_):
                raise OSError(28, "No space left on device")

            patch.setattr(os, name, fail)
            with pytest.raises(OSError, match="No space left"):
                make_pool(seed=1).save(path)
        assert path.read_bytes() == old
        assert list(path.parent.iterdir()) == [path]
    with pytest.raises(OSError):
        pool.save(path.parent / "no folder" / "states")
    (path.parent / "folder").mkdir()
    with pytest.raises(OSError):
        pool.save(path.parent / "folder")
    assert {each.name for each in path.parent.iterdir()} == {path.name, "folder"}


def test_the_new_file_is_on_the_disk_before_it_has_the_name(path, monkeypatch):
    """fsync of the file, rename, fsync of the folder: in this order, or a power cut may leave an empty file."""
    happened = []
    fsync, replace = os.fsync, Path.replace

    def note_fsync(descriptor):
        kind = "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"
        happened.append((f"fsync {kind}", os.fstat(descriptor).st_size if kind == "file" else None))
        fsync(descriptor)

    def note_replace(self, target):
        happened.append(("rename", None))
        assert self.parent == path.parent  # another file system could not be renamed from
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(Path, "replace", note_replace)
    make_pool().save(path)
    assert happened == [("fsync file", path.stat().st_size), ("rename", None), ("fsync folder", None)]


def test_permissions_and_links_stay(path):
    make_pool().save(path)
    usual = path.parent / "usual"
    usual.touch()
    assert path.stat().st_mode == usual.stat().st_mode
    path.chmod(0o600)
    link = path.parent / "link"
    link.symlink_to(path.name)
    make_pool(seed=1).save(link)
    assert link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert make_pool().load(link, [1, 2, 3]).tolist() == [1, 2, 3]


def test_names_may_be_as_long_as_the_file_system_allows(tmp_path):
    path = tmp_path / ("x" * 255)
    make_pool().save(str(path))
    make_pool().load(os.fspath(path), [1, 2, 3])


KILLED_AT_EVERY_LINE = """
import os, signal, sys
from pathlib import Path
import numpy as np
from kda_cupy import StatePool
from kda_cupy.pool import files, tensor_file

path, pool = Path(sys.argv[1]), StatePool(2, 1, 8, layers=2, device="cpu")
slots = pool.allocate(2)

def save(value):
    pool.state[:, slots] = value
    pool.save(path)
    return path.read_bytes()

new, old = save(2), save(1)
pool.state[:, slots] = 2
traced = {files.__file__, tensor_file.__file__}

def kill_at(line):
    seen = 0
    def local(frame, event, argument):
        nonlocal seen
        seen += 1
        if seen == line:
            os.kill(os.getpid(), signal.SIGKILL)
        return local
    sys.settrace(lambda frame, event, argument: local if frame.f_code.co_filename in traced else None)
    pool.save(path)
    sys.settrace(None)
    os._exit(0)

found, line = [], 0
while True:
    line += 1
    path.write_bytes(old)
    child = os.fork()
    if not child:
        kill_at(line)
    _, status = os.waitpid(child, 0)
    content = path.read_bytes()
    assert content in (old, new), (line, len(content))
    found.append(content == new)
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 0 and content == new
        break
    assert os.WTERMSIG(status) == signal.SIGKILL
print(len(found), found.index(True))
"""


def run_python(code, *arguments, **options):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def test_killed_at_every_line_of_save(path):
    """kill -9 before each line that the code of a save runs: the file is the old one, from some line on the new one."""
    with run_python(KILLED_AT_EVERY_LINE, path) as child:
        out, complaint = child.communicate(timeout=200)
    assert child.returncode == 0, complaint
    killed, first_new = map(int, out.split())
    assert killed > 50  # the lines were there to be killed at
    assert 30 < first_new < killed


SAVES_ALL_DAY = """
import sys
from kda_cupy import StatePool
pool = StatePool(8, 8, 128, layers=2, device="cpu")
slots = pool.allocate(8)
value = 0
while True:
    value += 1
    pool.state[:, slots] = value
    pool.save(sys.argv[1])
    print(value, flush=True)
"""


@pytest.mark.parametrize("milliseconds", [0, 1, 2, 3, 5, 8, 13, 21, 34])
def test_killed_from_outside_at_any_moment(path, milliseconds):
    """8 MB, so that most of the time is inside a write or an fsync. The file is the last one or the one before."""
    with run_python(SAVES_ALL_DAY, path) as child:
        assert child.stdout.readline() == "1\n"
        time.sleep(milliseconds / 1000)
        child.send_signal(signal.SIGKILL)
        printed = child.stdout.read().split()
    last = int(printed[-1]) if printed else 1
    pool = StatePool(8, 8, 128, layers=2, device="cpu")
    slots = pool.load(path)
    assert len(slots) == 8
    values = np.unique(pool.state[:, slots])
    assert values.tolist() in ([last], [last + 1])
    left = [each.name for each in path.parent.iterdir() if each != path]
    assert len(left) <= 1
    assert all(name.startswith(".") and name.endswith(".kda_cupy.tmp") for name in left)


def test_the_dtypes_of_the_format_are_those_of_the_package():
    names = {
        "F32": np.float32,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "I32": np.int32,
        "I64": np.int64,
    }
    assert {name: np.dtype(dtype) for name, dtype in names.items()} == tensor_file._DTYPES
