# SPDX-License-Identifier: Apache-2.0
"""Any sequence of calls on a StatePool, next to a dictionary that says what is in each slot, to the bit.

A run of CI takes some 5,000 steps; ``--hypothesis-profile long`` takes 100,000.
"""

import shutil
import tempfile
from collections import Counter
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from problems import same_bits

from kda_cupy import OperandError, PoolExhausted, SlotError, StatePool

HV, V, K, H = 2, 3, 8, 1
CHANNELS = 2 * H * K + HV * V
CONV_DTYPES = [None, "bfloat16", "float32"]
LARGEST = 7
steps = Counter()
"""How often each rule ran, of all runs in this process."""


class Contents(dict):
    """What one slot holds: arrays [layers, ...] by name."""

    def same(self, other):
        return self.keys() == other.keys() and all(same_bits(self[name], other[name]) for name in self)


class PoolModel(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())

    def teardown(self):
        shutil.rmtree(self.folder)

    @initialize(
        capacity=st.integers(1, LARGEST),
        layers=st.integers(1, 3),
        conv=st.sampled_from(CONV_DTYPES),
        wrapped=st.booleans(),
        seed=st.integers(0, 2**32 - 1),
    )
    def make(self, capacity, layers, conv, wrapped, seed):
        self.capacity, self.layers = capacity, layers
        self.rng = np.random.default_rng(seed)
        self.options = {"layers": layers, "num_key_heads": H, "activation_dtype": conv, "device": "cpu"}
        self.pool = self.wrapped(conv) if wrapped else StatePool(capacity, HV, K, V, **self.options)
        self.gaps = self.memory.tobytes() if wrapped else None
        self.held: dict[int, Contents] = {}
        self.snapshots = []

    def wrapped(self, conv):
        """A pool in somebody else's memory, with something of theirs between the slots."""
        P, slot = self.capacity + 1, HV * V * K
        raw = np.zeros(self.layers * P * (slot + 4) + 4, np.float32)
        start = -raw.ctypes.data % 16 // 4
        self.memory = raw[start : start + self.layers * P * (slot + 4)].reshape(self.layers, P, slot + 4)
        state = self.memory[..., :slot].reshape(self.layers, P, HV, V, K, copy=False)
        self.memory = self.memory[..., slot:]
        self.memory[...] = 12345
        history = None
        if conv is not None:
            dtype = ml_dtypes.bfloat16 if conv == "bfloat16" else conv
            history = np.zeros((self.layers, P, CHANNELS, 3), dtype)
        return StatePool.wrap(state, history, num_key_heads=H)

    def arrays(self, pool=None):
        pool = pool or self.pool
        return {"state": pool.state} | ({} if pool.conv is None else {"conv": pool.conv})

    def read(self, slot, pool=None):
        return Contents({name: array[:, slot].copy() for name, array in self.arrays(pool).items()})

    def random_bits(self, array):
        """Every bit pattern: NaN, subnormal, minus zero."""
        bits = self.rng.integers(0, 1 << 8 * array.itemsize, array.shape, np.uint64)
        return bits.astype(f"u{array.itemsize}").view(array.dtype)

    def write(self, slot):
        """What decoding does to a slot, as far as a pool can know."""
        for array in self.arrays().values():
            array[:, slot] = self.random_bits(array[:, slot])
        self.held[slot] = self.read(slot)

    def took(self, slots):
        """Slots that were handed out: nobody has them, they are zero, and they are written to from now on."""
        assert all(type(slot) is int for slot in slots)
        assert len(set(slots)) == len(slots)
        assert not set(slots) & self.held.keys()
        assert set(slots) <= set(range(1, self.capacity + 1))
        for slot in slots:
            for array in self.read(slot).values():
                assert not array.tobytes().strip(b"\0")  # minus zero is no zero
            self.write(slot)

    def some_held(self, data, *, least=0, unique=True):
        return data.draw(
            st.lists(st.sampled_from(sorted(self.held)), min_size=least, max_size=LARGEST, unique=unique)
        )

    @property
    def free(self):
        return self.capacity - len(self.held)

    # Slots

    @rule()
    def allocate_one(self):
        steps["allocate"] += 1
        if self.free:
            self.took([self.pool.allocate()])
        else:
            with pytest.raises(PoolExhausted):
                self.pool.allocate()

    @rule(n=st.integers(0, LARGEST + 1))
    def allocate_many(self, n):
        steps["allocate(n)"] += 1
        if n <= self.free:
            slots = self.pool.allocate(n)
            assert (slots.dtype, slots.shape) == (np.int32, (n,))
            self.took(slots.tolist())
            slots[:] = -1  # the caller's own
        else:
            with pytest.raises(PoolExhausted):
                self.pool.allocate(n)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release_some(self, data):
        steps["release"] += 1
        slots = self.some_held(data)
        self.pool.release(slots)
        for slot in slots:
            del self.held[slot]

    @rule(data=st.data(), bad=st.integers(-2, LARGEST + 3), method=st.sampled_from(["release", "snapshot"]))
    def name_a_slot_that_is_not_held(self, data, bad, method):
        steps["wrong slot"] += 1
        if bad not in self.held:
            good = self.some_held(data) if self.held else []
            with pytest.raises(SlotError):
                getattr(self.pool, method)(data.draw(st.permutations([*good, bad])))

    @rule()
    def fail_in_a_block(self):
        steps["slot()"] += 1
        if not self.free:
            return
        with pytest.raises(KeyError), self.pool.slot() as slot:
            assert slot not in self.held
            raise KeyError

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def decode(self, data):
        steps["write"] += 1
        self.write(data.draw(st.sampled_from(sorted(self.held))))

    # Copies

    @precondition(lambda self: self.held)
    @rule(data=st.data(), n=st.integers(0, 4))
    def fork(self, data, n):
        steps["fork"] += 1
        source = data.draw(st.sampled_from(sorted(self.held)))
        if n > self.free:
            with pytest.raises(PoolExhausted):
                self.pool.fork(source, n)
            return
        slots = [self.pool.fork(source)] if n == 1 else self.pool.fork(source, n).tolist()
        assert len(set(slots)) == n
        assert not set(slots) & self.held.keys()
        for slot in slots:
            assert self.read(slot).same(self.held[source])
            self.held[slot] = self.read(slot)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def snapshot(self, data):
        steps["snapshot"] += 1
        slots = self.some_held(data, unique=False)
        taken = self.pool.snapshot(slots)
        self.snapshots = [*self.snapshots[-3:], (taken, [self.held[slot] for slot in slots])]

    @precondition(lambda self: self.snapshots and self.held)
    @rule(data=st.data())
    def restore(self, data):
        steps["restore"] += 1
        taken, contents = data.draw(st.sampled_from(self.snapshots))
        slots = self.some_held(data, unique=False)
        if len(slots) != len(contents):
            with pytest.raises(OperandError):
                self.pool.restore(taken, slots)
        elif len(set(slots)) < len(slots):
            with pytest.raises(SlotError):
                self.pool.restore(taken, slots)
        else:
            self.pool.restore(taken, slots)
            self.held |= zip(slots, contents, strict=True)

    @precondition(lambda self: self.snapshots)
    @rule(data=st.data())
    def restore_in_place(self, data):
        steps["restore in place"] += 1
        taken, contents = data.draw(st.sampled_from(self.snapshots))
        slots = taken.slots
        if set(slots) <= self.held.keys() and len(set(slots)) == len(slots):
            self.pool.restore(taken)
            self.held |= zip(slots, contents, strict=True)
        else:
            with pytest.raises(SlotError):
                self.pool.restore(taken)

    # Files

    @rule(data=st.data(), all_of_them=st.booleans())
    def save_and_load(self, data, all_of_them):
        steps["save and load"] += 1
        slots = sorted(self.held) if all_of_them or not self.held else self.some_held(data)
        path = self.folder / "states.safetensors"
        self.pool.save(path, *([] if all_of_them else [slots]))
        other = StatePool(self.capacity, HV, K, V, **self.options)
        assert other.load(path).tolist() == slots
        assert other.slots_in_use.tolist() == sorted(slots)
        for slot in slots:
            assert self.read(slot, other).same(self.held[slot])
        if slots:
            with pytest.raises(SlotError):
                self.pool.load(path)
        kept = [self.held[slot] for slot in slots]
        for slot in slots:
            self.write(slot)
        order = data.draw(st.permutations(slots))
        assert self.pool.load(path, order).tolist() == list(order)
        self.held |= zip(order, kept, strict=True)
        assert [each.name for each in self.folder.iterdir()] == [path.name]

    # Other layouts

    @rule(data=st.data(), layout=st.sampled_from(["KV", "VK"]), n=st.integers(0, 3))
    def import_states(self, data, layout, n):
        steps["import"] += 1
        states = self.random_bits(np.empty((self.layers, n, HV, V, K), np.float32))
        theirs = states if layout == "VK" else np.ascontiguousarray(states.swapaxes(-1, -2))
        theirs = theirs if self.layers > 1 else theirs[0]
        slots = data.draw(st.sampled_from([None, self.some_held(data) if self.held else []]))
        if slots is None and n > self.free:
            with pytest.raises(PoolExhausted):
                self.pool.import_state(theirs, layout=layout)
        elif slots is not None and len(slots) != n:
            with pytest.raises(OperandError):
                self.pool.import_state(theirs, slots, layout=layout)
        else:
            got = self.pool.import_state(theirs, slots, layout=layout).tolist()
            for row, slot in enumerate(got):
                assert (slot in self.held) == (slots is not None)
                old = self.held.get(slot, {name: np.zeros_like(a[:, 0]) for name, a in self.arrays().items()})
                self.held[slot] = Contents({**old, "state": states[:, row]})

    @precondition(lambda self: self.held)
    @rule(data=st.data(), layout=st.sampled_from(["KV", "VK"]))
    def export_states(self, data, layout):
        steps["export"] += 1
        slots = self.some_held(data, least=1, unique=False)
        got = self.pool.export_state(slots, layout=layout)
        got = got if self.layers > 1 else got[None]
        wanted = np.stack([self.held[slot]["state"] for slot in slots], axis=1)
        assert same_bits(got, wanted if layout == "VK" else wanted.swapaxes(-1, -2))

    # What is always true

    @invariant()
    def the_numbers_agree(self):
        steps["checked"] += 1
        assert self.pool.free_slots == self.free
        assert len(self.pool) == self.capacity
        assert self.pool.slots_in_use.tolist() == sorted(self.held)
        assert f" {len(self.held)} of {self.capacity} slots in use" in repr(self.pool)

    @invariant()
    def every_slot_holds_what_was_written_to_it(self):
        for slot, contents in self.held.items():
            note(f"slot {slot}")
            assert self.read(slot).same(contents)
        for array in self.read(0).values():
            assert not array.view(f"u{array.itemsize}").any()
        if self.gaps is not None:
            assert self.memory.tobytes() == self.gaps


TestPoolModel = PoolModel.TestCase
TestPoolModel.settings = settings(deadline=None)  # the number of examples is the profile's


def teardown_module():
    print(f"\n{sum(count for name, count in steps.items() if name != 'checked'):,} steps: {dict(steps)}")
