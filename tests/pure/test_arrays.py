# SPDX-License-Identifier: Apache-2.0
"""ArrayInfo against NumPy's own flags, and against the addresses of all elements, over shapes and strides."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kda_cupy.arrays import HOST, ArrayInfo, describe, is_cupy, is_numpy, shares_memory
from kda_cupy.checks import check_strides, strides_text
from kda_cupy.errors import OperandError

DTYPES = (np.float32, ml_dtypes.bfloat16, np.int64, np.dtype([("a", "u1"), ("b", "f4")]))
BASES = {np.dtype(dtype): np.zeros((6, 5, 4), dtype) for dtype in DTYPES}


@st.composite
def views(draw, base=None):
    """A view of one of BASES: sliced (steps of either sign), transposed, sometimes with axes of length 1 or 0."""
    array = draw(st.sampled_from(list(BASES.values()))) if base is None else base
    key = draw(hnp.basic_indices(array.shape, allow_newaxis=True, allow_ellipsis=False, max_dims=5))
    view = array[key]
    view = view if isinstance(view, np.ndarray) else np.asarray(view)
    if view.dtype.names and draw(st.booleans()):
        view = view["b"]  # strides that are no whole number of elements
    return view.transpose(draw(st.permutations(range(view.ndim))))


def addresses(array):
    """Addresses of the first bytes of all elements, by the definition of a stride."""
    start = array.__array_interface__["data"][0]
    for index in np.ndindex(array.shape):
        yield start + sum(i * stride for i, stride in zip(index, array.strides, strict=True))


def bytes_of(array):
    return {address + byte for address in addresses(array) for byte in range(array.itemsize)}


@given(views())
def test_contiguity_is_what_numpy_says(view):
    info, _ = describe(view)
    assert info.is_contiguous == view.flags.c_contiguous
    assert (info.rank, info.size) == (view.ndim, view.size)


@given(views())
def test_contiguous_in_last_means_that_the_last_axis_steps_by_one_element(view):
    info, _ = describe(view)
    steps = (
        {after - before for before, after in itertools.pairwise(addresses(view[(0,) * (view.ndim - 1)]))}
        if view.size and view.ndim
        else set()
    )
    assert info.is_contiguous_in_last == (view.ndim > 0 and steps <= {view.itemsize})


@given(views())
def test_the_span_covers_all_elements_and_no_more(view):
    info, pointer = describe(view)
    covered = bytes_of(view)
    if not covered:
        assert (info.span_bytes, info.lowest_offset) == (0, 0)
        return
    start = pointer + info.lowest_offset
    assert (start, start + info.span_bytes - 1) == (min(covered), max(covered))


@given(st.data(), st.sampled_from(list(BASES.values())))
@settings(max_examples=300)
def test_shares_memory_is_exact(data, base):
    left, right = data.draw(views(base)), data.draw(views(base))
    wanted = not bytes_of(left).isdisjoint(bytes_of(right))
    assert shares_memory(*describe(left), *describe(right)) == wanted == np.shares_memory(left, right)


def test_shares_memory_tells_interleaved_views_apart():
    buffer = np.zeros((8, 2, 6), np.float32)
    pool, other = buffer[:, 0], buffer[:, 1]  # each lies in the gaps of the other
    assert not shares_memory(*describe(pool), *describe(other))
    assert shares_memory(*describe(pool), *describe(buffer[3:4, :, 5]))
    assert not shares_memory(*describe(pool), *describe(buffer[3:4, 1:, 5]))


@pytest.mark.parametrize("reversed_axis", [0, 1])
def test_shares_memory_looks_below_the_address_of_a_negative_stride(reversed_axis):
    buffer = np.zeros((4, 4), np.float32)
    backwards = np.flip(buffer, reversed_axis)
    assert shares_memory(*describe(backwards), *describe(buffer[:1, :1]))
    assert shares_memory(*describe(buffer[:1, :1]), *describe(backwards))


def test_shares_memory_never_across_devices_or_for_empty_arrays():
    info, pointer = describe(np.zeros(4, np.float32))
    assert shares_memory(info, pointer, info, pointer)
    assert not shares_memory(info, pointer, info._replace(device=0), pointer)
    empty = info._replace(shape=(0,))
    assert not shares_memory(empty, pointer, info, pointer)
    assert not shares_memory(info, pointer, empty, pointer)


def test_shares_memory_reads_no_memory():
    info = ArrayInfo((2, 3), (64, 4), np.dtype(np.float32), 0, 0)  # of a GPU: nothing the host can read
    assert shares_memory(info, 0x7F00_0000_0000, info, 0x7F00_0000_0040)
    assert not shares_memory(info, 0x7F00_0000_0000, info, 0x7F00_0000_0010)


@given(st.sampled_from([(1, 5), (5, 1), (1, 1), (1,)]), st.integers(-(2**62), 2**62))
@example((1, 5), 2112 * 4)  # a row of a wider projection
@example((1, 5), 2**62 - 1)  # what some exporters write
def test_axes_of_length_one_may_have_any_stride(shape, odd):
    dense, _ = describe(np.zeros(shape, np.float32))
    strides = tuple(
        odd if length == 1 else stride for length, stride in zip(shape, dense.strides, strict=True)
    )
    info = dense._replace(strides=strides)
    assert info.is_contiguous
    assert info.is_contiguous_in_last
    assert info.span_bytes == dense.span_bytes
    assert info.lowest_offset == 0
    check_strides("x", info)


def test_row_of_a_wider_buffer_is_contiguous():
    row = np.zeros((1, 2112), np.float32)[:, :1536]
    assert row.strides == (2112 * 4, 4)
    assert describe(row)[0].is_contiguous
    assert not describe(np.zeros((2, 2112), np.float32)[:, :1536])[0].is_contiguous


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (3, 0, 2)])
def test_arrays_without_elements_are_contiguous(shape):
    info, _ = describe(np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), shape, (12,) * len(shape)))
    assert info.is_contiguous
    assert info.is_contiguous_in_last
    assert info.span_bytes == 0


def test_a_number_is_contiguous_but_has_no_last_axis():
    info, _ = describe(np.ones(()))
    assert info.is_contiguous
    assert not info.is_contiguous_in_last


def test_check_strides_refuses_strides_between_elements():
    field = np.zeros(4, np.dtype([("tag", "u1"), ("value", "f4")]))["value"]
    info, _ = describe(field)
    assert info.strides == (5,)
    with pytest.raises(OperandError) as caught:
        check_strides("a", info)
    assert caught.value.code == "KDA-ARRAY-NEGATIVE-STRIDE"
    assert caught.value.got == strides_text(info) == "strides [5] bytes for elements of 4"


@given(views())
def test_check_strides_refuses_just_the_negative_and_the_fractional(view):
    info, _ = describe(view)
    bad = any(n > 1 and (s < 0 or s % view.itemsize) for n, s in zip(view.shape, view.strides, strict=True))
    if bad:
        with pytest.raises(OperandError):
            check_strides("x", info)
    else:
        check_strides("x", info)


@given(st.integers(0, 40))
def test_describe_knows_address_and_alignment(offset):
    raw = np.zeros(64, np.uint8)
    info, pointer = describe(raw[offset : offset + 8])
    assert pointer == raw.ctypes.data + offset
    assert info.misalignment == pointer % 16
    assert info.device == HOST
    assert info.place == "host memory"


def test_describe_knows_who_may_write():
    array = np.zeros(3)
    assert describe(array)[0].writeable
    array.flags.writeable = False
    assert not describe(array)[0].writeable
    assert not describe(np.broadcast_to(array, (2, 3)))[0].writeable


def test_like_layouts_are_equal_keys():
    left, right = (np.zeros((2, 3, 64), ml_dtypes.bfloat16)[:, 1] for _ in range(2))
    (left, _), (right, _) = describe(left), describe(right)
    assert left._replace(misalignment=0) == right._replace(misalignment=0)
    assert hash(left._replace(misalignment=0)) == hash(right._replace(misalignment=0))
    assert left != left._replace(writeable=False)
    assert left != left._replace(device=0)


def test_stride_counts_elements():
    info, _ = describe(np.zeros((3, 4), np.float32)[::2])
    assert (info.stride(0), info.stride(1)) == (8, 1)


def test_kinds():
    class ndarray:  # a name alone makes no CuPy array
        pass

    assert is_numpy(np.zeros(1))
    assert not is_numpy([1.0])
    assert not any(map(is_cupy, (np.zeros(1), ndarray(), [1.0], None)))
