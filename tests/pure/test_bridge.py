# SPDX-License-Identifier: Apache-2.0
"""Arrays of other libraries in host memory: torch, JAX, and a producer of our own that does whatever dlpack.h allows.

Whatever the arrays come from, the bits must be those of the call with NumPy arrays.
"""

import gc
import os
import resource
import sys
import threading
import weakref

import ml_dtypes
import numpy as np
import pytest
from problems import POISON, make_problem, out_shape, same_bits, to, to_library
from producers import OnlyStream, Producer, alive, python

from kda_cupy import BridgeError, DeviceError, NoGpuError, OperandError, bind, bridge
from kda_cupy import gdn_packed_decode as gdn
from kda_cupy import kda_packed_decode as kda
from kda_cupy.gpu import choose_backend

# JAX reads these when it starts: not to take most of a GPU that others test on, and a CPU that is not the default one.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

OPERATIONS = {"kda": kda, "gdn": gdn}
DTYPES = ("bfloat16", "float16", "float32")
INPUTS = ("mixed_qkv", "a", "b", "A_log", "dt_bias", "ssm_state_indices")


def small_problem(op="kda", dtype="bfloat16", **changes):
    return make_problem(op, **({"B": 3, "H": 2, "HV": 4, "K": 16, "V": 8, "dtype": dtype} | changes))


def expected(op, problem, **changes):
    """Output and state of the call with NumPy arrays, on a copy of the problem."""
    return OPERATIONS[op](**to(problem, np) | changes)


def refused(call, error, code, operand):
    """The message of a refusal that names the operand."""
    with pytest.raises(error) as caught:
        call()
    assert (caught.value.code, caught.value.operand) == (code, operand)
    message = str(caught.value)
    assert operand in message
    return message


def numbers(shape=(2, 3), dtype=np.float32):
    return np.arange(1, 1 + np.prod(shape), dtype=np.float32).astype(dtype).reshape(shape)


# Operations on the arrays of others


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row_padding", [0, 8])
def test_torch(torch, op, dtype, row_padding):
    problem = small_problem(op, dtype, row_padding=row_padding, index_dtype="int64")
    theirs = to(problem, torch)
    out, state = OPERATIONS[op](**theirs)
    wanted_out, wanted_state = expected(op, problem)
    assert type(out) is torch.Tensor
    assert out.dtype is getattr(torch, dtype)
    assert out.is_contiguous()
    assert state is theirs["initial_state"]
    assert same_bits(out, wanted_out)
    assert same_bits(state, wanted_state)
    for name in INPUTS:
        assert same_bits(theirs[name], problem[name]), name


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_jax(jax, op, dtype):
    """JAX arrays as inputs. The pool is written in place, so it is NumPy's."""
    problem = small_problem(op, dtype)
    cpu = jax.devices("cpu")[-1]
    theirs = to({name: problem[name] for name in INPUTS}, jax, cpu)
    out, state = OPERATIONS[op](**theirs, initial_state=problem["initial_state"])
    wanted_out, wanted_state = expected(op, small_problem(op, dtype))
    assert isinstance(out, jax.Array)
    assert out.devices() == {cpu}
    assert out.dtype == dtype
    assert state is problem["initial_state"]
    assert same_bits(out, wanted_out)
    assert same_bits(state, wanted_state)


def test_jax_arrays_that_are_still_being_computed(jax):
    problem = small_problem("kda", "float32")
    with jax.default_device(jax.devices("cpu")[0]):
        slow = jax.numpy.ones((1000, 1000))
        for _ in range(8):
            slow = slow @ slow / 1000
        later = jax.numpy.asarray(problem["mixed_qkv"]) * slow[0, 0]  # times 1, in a while
    out, _ = kda(**to(problem, np) | {"mixed_qkv": later})
    assert same_bits(out, expected("kda", problem)[0])


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [Producer, OnlyStream])
def test_any_producer(op, dtype, kind):
    """A library that is neither: it gets NumPy arrays back."""
    problem = small_problem(op, dtype, row_padding=4)
    arrays = to(problem, np)
    theirs = {name: kind(array) for name, array in arrays.items()}
    out, state = OPERATIONS[op](**theirs)
    wanted_out, wanted_state = expected(op, problem)
    assert type(out) is np.ndarray
    assert state is theirs["initial_state"]
    assert same_bits(out, wanted_out)
    assert same_bits(arrays["initial_state"], wanted_state)


def test_libraries_may_be_mixed(torch, jax):
    """The result has the type of mixed_qkv."""
    problem = small_problem()
    on_cpu = jax.devices("cpu")[0]
    arrays = {
        "mixed_qkv": to_library(problem["mixed_qkv"], torch),
        "a": to_library(problem["a"], jax, on_cpu),
        "b": Producer(problem["b"]),
        "ssm_state_indices": to_library(problem["ssm_state_indices"], torch),
        "initial_state": problem["initial_state"].copy(),
    }
    out, state = kda(**problem | arrays)
    wanted_out, wanted_state = expected("kda", problem)
    assert type(out) is torch.Tensor
    assert same_bits(out, wanted_out)
    assert same_bits(state, wanted_state)
    mixed_qkv = to_library(problem["mixed_qkv"], jax, on_cpu)
    out, _ = kda(**to(problem, torch) | {"mixed_qkv": mixed_qkv})
    assert isinstance(out, jax.Array)
    assert same_bits(out, wanted_out)


def test_torch_out_is_written_and_returned(torch):
    problem = small_problem()
    theirs = to(problem, torch)
    out = torch.full(out_shape(problem), float("nan"), dtype=torch.bfloat16)
    returned, _ = kda(**theirs, out=out)
    assert returned is out
    assert same_bits(out, expected("kda", problem)[0])


def test_numpy_operands_with_a_torch_out(torch):
    problem = small_problem()
    out = torch.empty(out_shape(problem), dtype=torch.bfloat16)
    returned, _ = kda(**to(problem, np), out=out)
    assert returned is out
    assert same_bits(out, expected("kda", problem)[0])


def test_torch_pool_is_updated_in_place_between_its_gaps(torch):
    problem = small_problem(slot_padding=20)
    wide = torch.full((6, 4 * 8 * 16 + 20), POISON)
    pool = wide[:, : 4 * 8 * 16].view(6, 4, 8, 16)
    pool.copy_(to_library(problem["initial_state"].copy(), torch))
    address = pool.data_ptr()
    _, state = kda(**to(problem, torch) | {"initial_state": pool})
    assert state is pool
    assert pool.data_ptr() == address
    assert same_bits(pool, expected("kda", problem)[1])
    assert (wide[:, 4 * 8 * 16 :] == POISON).all()


def test_empty_batches(torch, jax):
    problem = small_problem(B=0)
    out, _ = kda(**to(problem, torch))
    assert type(out) is torch.Tensor
    assert out.shape == (0, 1, 4, 8)
    cpu = jax.devices("cpu")[0]
    out, _ = kda(
        **to({name: problem[name] for name in INPUTS}, jax, cpu), initial_state=problem["initial_state"]
    )
    assert isinstance(out, jax.Array)
    assert out.shape == (0, 1, 4, 8)


def test_bound_calls_see_new_contents(torch):
    problem = small_problem()
    theirs = to(problem, torch)
    call = bind(kda, **theirs)
    out, state = call()
    assert type(out) is torch.Tensor
    assert state is theirs["initial_state"]
    first_out, first_state = expected("kda", problem)
    assert same_bits(out, first_out)
    theirs["mixed_qkv"].neg_()
    theirs["ssm_state_indices"].copy_(theirs["ssm_state_indices"].flip(0))
    again = problem | {"initial_state": first_state}
    again |= {
        "mixed_qkv": -problem["mixed_qkv"],
        "ssm_state_indices": problem["ssm_state_indices"][::-1].copy(),
    }
    assert call()[0] is out
    second_out, second_state = expected("kda", again)
    assert same_bits(out, second_out)
    assert same_bits(state, second_state)


# torch's own peculiarities


def test_tensors_that_require_grad_are_detached(torch):
    problem = small_problem()
    theirs = to(problem, torch)
    for name in ("mixed_qkv", "a", "b", "A_log", "dt_bias"):
        theirs[name].requires_grad_()
    theirs["initial_state"] = torch.nn.Parameter(theirs["initial_state"])
    out, state = kda(**theirs)
    wanted_out, wanted_state = expected("kda", problem)
    assert not out.requires_grad
    assert type(out) is torch.Tensor
    assert state is theirs["initial_state"]
    assert same_bits(out, wanted_out)
    assert same_bits(state, wanted_state)


def test_parameters_give_plain_tensors(torch):
    problem = small_problem()
    theirs = to(problem, torch)
    theirs["mixed_qkv"] = torch.nn.Parameter(theirs["mixed_qkv"])
    assert type(kda(**theirs)[0]) is torch.Tensor


def test_out_may_require_grad(torch):
    problem = small_problem()
    out = torch.zeros(out_shape(problem), dtype=torch.bfloat16, requires_grad=True)
    assert kda(**to(problem, torch), out=out)[0] is out
    assert same_bits(out, expected("kda", problem)[0])


def test_inference_mode(torch):
    problem = small_problem()
    with torch.inference_mode():
        out, _ = kda(**to(problem, torch))
    assert same_bits(out, expected("kda", problem)[0])


def test_a_producer_needs_no_ml_dtypes(torch, monkeypatch):
    """F1: torch has a bfloat16 of its own; only we need NumPy's."""
    problem = small_problem(dtype="bfloat16")
    wanted_out, wanted_state = expected("kda", problem)
    theirs = to(problem, torch)
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    out, state = kda(**theirs)
    monkeypatch.undo()
    assert out.dtype is torch.bfloat16
    assert same_bits(out, wanted_out)
    assert same_bits(state, wanted_state)


def torch_oddities(torch):
    values = torch.arange(1.0, 7).reshape(2, 3)
    yield "sparse", values.to_sparse(), "layout"
    yield "meta", values.to("meta"), "meta"
    yield (
        "negative bit",
        torch.view_as_complex(values.repeat(1, 2).reshape(2, 3, 2)).conj().imag,
        "negative bit",
    )
    yield "conjugate bit", torch.view_as_complex(values.repeat(1, 2).reshape(2, 3, 2)).conj(), "conjugate bit"
    yield "the class", torch.Tensor, "missing 1"


def test_tensors_without_plain_memory_are_refused_by_name(torch):
    for what, tensor, word in torch_oddities(torch):
        message = refused(lambda odd=tensor: bridge.adopt("a", odd), BridgeError, "KDA-ARRAY-KIND", "a")
        assert word in message, what


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_fake_tensors_are_refused(torch):
    subclasses = pytest.importorskip("torch._subclasses")
    with subclasses.FakeTensorMode():
        fake = torch.ones(3)
    refused(lambda: bridge.adopt("b", fake), BridgeError, "KDA-ARRAY-KIND", "b")


def test_tensors_under_vmap_are_refused(torch):
    def under_vmap(tensor):
        refused(lambda: bridge.adopt("b", tensor), BridgeError, "KDA-ARRAY-KIND", "b")
        return tensor

    torch.vmap(under_vmap)(torch.ones(2, 3))


@pytest.mark.parametrize("dtype", ["float64", "int8", "uint8", "int16", "int64", "bool", "complex64"])
def test_every_plain_type_of_torch_is_read_right(torch, dtype):
    tensor = torch.tensor([[1, 0, 1], [0, 1, 1]]).to(getattr(torch, dtype))
    view = bridge.adopt("a", tensor)
    assert view.dtype == dtype
    np.testing.assert_array_equal(view, [[1, 0, 1], [0, 1, 1]])


def test_eight_bit_floats_are_refused_by_name(torch):
    tensor = torch.ones(3).to(torch.float8_e4m3fn)
    message = refused(lambda: bridge.adopt("a", tensor), OperandError, "KDA-ARRAY-DTYPE", "a")
    assert "8 bits" in message


# JAX's own peculiarities


def test_jax_tracers_are_refused_by_name(jax):
    problem = small_problem()

    def traced(a):
        message = refused(lambda: kda(**problem | {"a": a}), BridgeError, "KDA-ARRAY-KIND", "a")
        assert "Tracer" in message
        return a

    jax.jit(traced)(jax.numpy.asarray(problem["a"]))


def test_deleted_jax_arrays_are_refused(jax):
    array = jax.numpy.ones(3, device=jax.devices("cpu")[0])
    array.delete()
    refused(lambda: bridge.adopt("a", array), BridgeError, "KDA-ARRAY-KIND", "a")


# Read-only memory


def unchanged(problem, before):
    return all(value is None or same_bits(value, before[name]) for name, value in problem.items())


@pytest.mark.parametrize("written", ["initial_state", "out"])
def test_jax_arrays_are_refused_where_something_is_written(jax, written):
    problem = small_problem()
    problem["out"] = np.full(out_shape(problem), 7, ml_dtypes.bfloat16)
    before = to(problem, np)
    theirs = problem | {written: jax.device_put(problem[written], jax.devices("cpu")[0])}
    refused(lambda: kda(**theirs), OperandError, "KDA-ARRAY-READ-ONLY", written)
    assert unchanged(theirs, before)


@pytest.mark.parametrize("written", ["initial_state", "out"])
@pytest.mark.parametrize("flags", ["numpy", 1, 2, 3])  # read-only; a copy, where writes would be lost; both
def test_read_only_memory_is_refused_where_something_is_written(written, flags):
    problem = small_problem()
    problem["out"] = np.full(out_shape(problem), 7, ml_dtypes.bfloat16)
    before = to(problem, np)
    if flags == "numpy":
        problem[written].flags.writeable = False
        theirs = problem
    else:
        theirs = problem | {written: Producer(problem[written], flags=flags)}
    refused(lambda: kda(**theirs), OperandError, "KDA-ARRAY-READ-ONLY", written)
    assert unchanged(problem, before)


def test_read_only_inputs_are_fine():
    problem = small_problem()
    wanted = expected("kda", problem)[0]
    frozen = dict(problem)
    for name in INPUTS:
        frozen[name] = problem[name].copy()
        frozen[name].flags.writeable = False
    assert same_bits(kda(**frozen | {"initial_state": problem["initial_state"].copy()})[0], wanted)
    flagged = {name: Producer(problem[name], flags=1) for name in INPUTS}
    assert same_bits(kda(**flagged, initial_state=problem["initial_state"].copy())[0], wanted)


def test_views_of_jax_arrays_are_read_only(jax):
    assert not bridge.adopt("a", jax.numpy.ones(3, device=jax.devices("cpu")[0])).flags.writeable


def test_views_of_read_only_memory_are_read_only():
    assert not bridge.adopt("a", Producer(numbers(), flags=1)).flags.writeable
    assert bridge.adopt("a", Producer(numbers())).flags.writeable


# What is no array


@pytest.mark.parametrize(
    "thing", [[1.0], (1.0,), "text", 3, 2.5, np.float32(3), object(), np.ndarray, len], ids=repr
)
@pytest.mark.parametrize("operand", ["mixed_qkv", "initial_state", "ssm_state_indices"])
def test_what_is_no_array_is_refused_by_name(thing, operand):
    problem = small_problem()
    before = to(problem, np)
    message = refused(lambda: kda(**problem | {operand: thing}), BridgeError, "KDA-ARRAY-KIND", operand)
    assert getattr(thing, "__qualname__", type(thing).__qualname__).split(".")[-1] in message or callable(
        thing
    )
    assert unchanged(problem, before)
    assert isinstance(BridgeError(""), TypeError)


@pytest.mark.parametrize("operand", ["mixed_qkv", "a", "b", "dt_bias", "initial_state", "ssm_state_indices"])
def test_none_is_refused_by_name(operand):
    assert "None" in refused(
        lambda: kda(**small_problem() | {operand: None}), BridgeError, "KDA-ARRAY-KIND", operand
    )


def test_raw_capsules_are_refused():
    """They carry no stream order."""
    for capsule in (
        Producer(numbers()).__dlpack__(),
        OnlyStream(numbers()).__dlpack__(),
        numbers().__dlpack__(),
    ):
        refused(lambda raw=capsule: bridge.adopt("a", raw), BridgeError, "KDA-ARRAY-CAPSULE", "a")
        refused(
            lambda raw=capsule: kda(**small_problem() | {"a": raw}), BridgeError, "KDA-ARRAY-CAPSULE", "a"
        )


def test_raw_capsules_of_torch_are_refused(torch):
    for capsule in (torch.utils.dlpack.to_dlpack(torch.ones(2)), torch.ones(2).__dlpack__()):
        refused(lambda raw=capsule: bridge.adopt("a", raw), BridgeError, "KDA-ARRAY-CAPSULE", "a")


# Protocols old and strange


@pytest.mark.parametrize(
    ("known", "tries"),
    [
        ({"stream", "max_version", "dl_device", "copy"}, 1),  # DLPack 1.0
        ({"stream", "max_version"}, 2),  # an early one
        ({"stream"}, 3),  # before it
        (set(), 3),  # in host memory there is no stream to speak of
    ],
    ids=["1.0", "early", "old", "nothing"],
)
def test_a_producer_is_asked_in_the_words_that_it_knows(known, tries):
    """F12: unknown keywords raise TypeError, and older capsules are read as well."""
    asked = []

    class Asks(Producer):
        def __dlpack__(self, **keywords):
            asked.append(keywords)
            if keywords.keys() - known:
                raise TypeError(f"unexpected keywords {keywords.keys() - known}")
            return super().__dlpack__()

    name = b"dltensor_versioned" if "max_version" in known else b"dltensor"
    assert same_bits(bridge.adopt("a", Asks(numbers(), name)), numbers())
    assert asked == [{"max_version": (1, 0), "copy": False}, {"max_version": (1, 0)}, {}][:tries]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_producer_that_would_have_to_copy_is_refused(dtype):
    """A copy would be made on every call, and a bound call would go on reading the first one."""

    class Copies(Producer):
        def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
            if copy is False:
                raise BufferError("cannot export without a copy")
            return super().__dlpack__(stream=stream, max_version=max_version)

    problem = small_problem(dtype=dtype)
    before = to(problem, np)
    for operand in INPUTS:
        message = refused(
            lambda lone=operand: kda(**problem | {lone: Copies(problem[lone])}),
            BridgeError,
            "KDA-ARRAY-KIND",
            operand,
        )
        assert "cannot export without a copy" in message
        message = refused(
            lambda lone=operand: bind(kda, **problem | {lone: Producer(problem[lone], flags=2)}),
            BridgeError,
            "KDA-ARRAY-KIND",
            operand,
        )
        assert "a copy of itself" in message
    assert unchanged(problem, before)


@pytest.mark.parametrize(
    "cause", [BufferError, RuntimeError, TypeError, ValueError, NotImplementedError, AssertionError, KeyError]
)
@pytest.mark.parametrize("method", ["__dlpack__", "__dlpack_device__"])
def test_a_producers_refusal_is_passed_on_with_the_operands_name(cause, method):
    def refuse(self, **keywords):
        raise cause("not on a Sunday")

    reluctant = type("Reluctant", (Producer,), {method: refuse})(numbers())
    with pytest.raises(BridgeError, match="not on a Sunday") as caught:
        bridge.adopt("b", reluctant)
    assert (caught.value.code, caught.value.operand) == ("KDA-ARRAY-KIND", "b")
    assert isinstance(caught.value.__cause__, cause)
    assert "Reluctant" in str(caught.value)


@pytest.mark.parametrize("answer", [None, 3, b"dltensor", numbers()], ids=["None", "int", "bytes", "array"])
def test_a_producer_that_hands_out_no_capsule_is_refused(answer):
    confused = type("Confused", (Producer,), {"__dlpack__": lambda self, **keywords: answer})(numbers())
    message = refused(lambda: bridge.adopt("b", confused), BridgeError, "KDA-ARRAY-KIND", "b")
    assert type(answer).__name__ in message


@pytest.mark.parametrize("name", [b"used_dltensor", b"used_dltensor_versioned", b"something_else"])
def test_used_and_unknown_capsules_are_refused(name):
    """F9: the memory of a used capsule belongs to somebody else."""
    producer = Producer(numbers(), name)
    others = set(alive)
    message = refused(lambda: bridge.adopt("b", producer), BridgeError, "KDA-ARRAY-KIND", "b")
    assert name.decode() in message
    for address in alive.keys() - others:  # such capsules delete nothing
        del alive[address]


def test_a_nameless_capsule_is_refused():
    capsule = python.PyCapsule_New(1, None, None)
    nameless = type("Nameless", (Producer,), {"__dlpack__": lambda self, **keywords: capsule})(numbers())
    refused(lambda: bridge.adopt("b", nameless), BridgeError, "KDA-ARRAY-KIND", "b")


@pytest.mark.parametrize("version", [(0, 9), (2, 0)])
def test_other_major_versions_are_refused(version):
    """Their structures may differ from the very first field on."""
    producer = Producer(numbers(), version=version)
    message = refused(lambda: bridge.adopt("b", producer), BridgeError, "KDA-ARRAY-KIND", "b")
    assert ".".join(map(str, version)) in message
    for _ in range(
        3
    ):  # the traceback held on to the capsule, and may hang in a cycle that takes a second pass
        gc.collect()
    assert len(producer.deleted) == 1


def test_later_minor_versions_are_read():
    assert same_bits(bridge.adopt("b", Producer(numbers(), version=(1, 7))), numbers())


# Layouts


@pytest.mark.parametrize("kind", [Producer, OnlyStream])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (2, 3, 4, 5), (1, 4, 1)])
def test_null_strides_mean_c_order(kind, shape):
    view = bridge.adopt("a", kind(numbers(shape), strides=None))
    assert same_bits(view, numbers(shape))
    assert view.flags.c_contiguous


@pytest.mark.parametrize("dtype", [*DTYPES, "int32", "int64", "float64", "bool"])
def test_strided_views_keep_address_and_strides(dtype):
    dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    array = numbers((6, 8), dtype)[1::2, 2:7]
    view = bridge.adopt("a", Producer(array))
    assert (view.shape, view.strides, view.dtype) == (array.shape, array.strides, array.dtype)
    assert view.__array_interface__["data"] == array.__array_interface__["data"]
    assert same_bits(view, array)


@pytest.mark.parametrize("axis", [0, 1])
def test_negative_strides_are_refused(axis):
    producer = Producer(np.flip(numbers((3, 4)), axis))
    refused(lambda: bridge.adopt("a", producer), OperandError, "KDA-ARRAY-NEGATIVE-STRIDE", "a")
    for _ in range(
        3
    ):  # the traceback held on to the capsule, and may hang in a cycle that takes a second pass
        gc.collect()
    assert len(producer.deleted) == 1


@pytest.mark.parametrize("operand", ["mixed_qkv", "b", "ssm_state_indices"])
def test_negative_strides_are_refused_by_operations(operand):
    problem = small_problem()
    backwards = problem[operand][::-1]
    for array in (backwards, Producer(backwards)):
        refused(
            lambda odd=array: kda(**problem | {operand: odd}),
            OperandError,
            "KDA-ARRAY-NEGATIVE-STRIDE",
            operand,
        )


@pytest.mark.parametrize("odd", [0, 1, 7, -3, 2**62 - 1, -(2**62), 2**63 - 1])
def test_axes_of_length_one_may_have_any_stride(odd):
    """C6, F3."""
    array = numbers((1, 6))
    view = bridge.adopt("a", Producer(array, strides=(odd, 1)))
    assert same_bits(view, array)
    assert same_bits(bridge.adopt("a", Producer(array.reshape(6, 1), strides=(1, odd))), array.reshape(6, 1))
    problem = small_problem(B=1, H=1, HV=1, P=2, slots=[1])
    theirs = dict(problem)
    for name in ("mixed_qkv", "a", "ssm_state_indices"):
        steps = [odd, *(stride // problem[name].itemsize for stride in problem[name].strides[1:])]
        theirs[name] = Producer(problem[name], strides=steps)
    state = problem["initial_state"][1:].copy()
    theirs["initial_state"] = Producer(state, strides=(odd, odd, 16, 1))
    theirs["ssm_state_indices"] = Producer(np.zeros(1, np.int32), strides=(odd,))
    out, _ = kda(**theirs)
    wanted_out, wanted_state = expected("kda", problem)
    assert same_bits(out, wanted_out)
    assert same_bits(state, wanted_state[1:])


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 4)])
@pytest.mark.parametrize("strides", [None, "theirs"])
def test_arrays_without_elements(shape, strides):
    fields = {"data": None} if strides is None else {}
    producer = Producer(
        np.zeros(shape, ml_dtypes.bfloat16), strides=None if strides is None else shape, **fields
    )
    view = bridge.adopt("a", producer)
    assert (view.shape, view.dtype) == (shape, ml_dtypes.bfloat16)
    assert view.flags.c_contiguous


def test_byte_offset_is_added_to_the_address():
    array = numbers((4, 3))
    producer = Producer(array[1:], data=array.ctypes.data, byte_offset=12)
    view = bridge.adopt("a", producer)
    assert view.__array_interface__["data"][0] == array.ctypes.data + 12
    assert same_bits(view, array[1:])


def test_a_pool_at_an_odd_byte_offset_is_refused():
    """C14: vectors are loaded from the address itself, wherever the allocation begins."""
    problem = small_problem()
    pool = problem["initial_state"]
    address = pool.ctypes.data
    for offset, fits in ((0, True), (16, True), (4, False), (8, False)):
        theirs = Producer(pool[:5], data=address, byte_offset=offset)
        changed = problem | {"initial_state": theirs, "ssm_state_indices": np.array([-1, -1, -1])}
        if fits:
            kda(**changed)
        else:
            refused(lambda odd=changed: kda(**odd), OperandError, "KDA-STATE-ALIGNMENT", "initial_state")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_elements_between_their_own_boundaries_are_refused(dtype):
    """A GPU cannot load them, and the answer must not depend on the backend."""
    problem = small_problem(dtype=dtype)
    shifted = Producer(problem["mixed_qkv"][:2], byte_offset=1)
    changed = {name: problem[name][:2] for name in ("a", "b", "ssm_state_indices")} | {"mixed_qkv": shifted}
    message = refused(lambda: kda(**problem | changed), OperandError, "KDA-ARRAY-ALIGNMENT", "mixed_qkv")
    assert "1 byte" in message


@pytest.mark.parametrize(
    "fields",
    [
        {"code": 3},  # an opaque handle
        {"code": 7},  # the 8-bit floats begin here
        {"code": 14},
        {"code": 255},
        {"bits": 4},
        {"bits": 8},
        {"bits": 24},
        {"bits": 128},
        {"bits": 0},
        {"code": 4},  # a bfloat of 32 bits
        {"code": 6},  # a bool of 32 bits
        {"code": 0, "bits": 128},
        {"lanes": 4},
        {"lanes": 0},
    ],
    ids=str,
)
def test_types_that_numpy_lacks_are_refused(fields):
    producer = Producer(numbers(), **fields)
    message = refused(lambda: bridge.adopt("a", producer), OperandError, "KDA-ARRAY-DTYPE", "a")
    for field, number in fields.items():
        assert str(number) in message, field
    for _ in range(
        3
    ):  # the traceback held on to the capsule, and may hang in a cycle that takes a second pass
        gc.collect()
    assert len(producer.deleted) == 1


def test_arrays_without_memory_are_refused():
    producer = Producer(numbers(), data=None)
    refused(lambda: bridge.adopt("a", producer), BridgeError, "KDA-ARRAY-KIND", "a")


# Lifetime


@pytest.mark.parametrize("kind", [Producer, OnlyStream])
def test_a_view_keeps_the_memory_alive_and_frees_it_once(kind):
    array = numbers((100, 100))
    memory = weakref.ref(array)
    producer = kind(array)
    deleted = producer.deleted
    view = bridge.adopt("a", producer)
    part = view[3:, ::2].T
    assert view.ctypes.data == array.ctypes.data
    del producer, array, view
    gc.collect()
    assert memory() is not None
    assert not deleted
    assert same_bits(part, numbers((100, 100))[3:, ::2].T)
    del part
    assert len(deleted) == 1
    assert memory() is None


def test_every_view_has_a_capsule_of_its_own():
    producer = Producer(numbers())
    views = [bridge.adopt("a", producer) for _ in range(3)]
    for count in (1, 2, 3):
        views.pop()
        assert len(producer.deleted) == count


def test_operations_hold_on_to_nothing():
    problem = small_problem()
    producers = {name: Producer(array) for name, array in problem.items()}
    kda(**producers)
    gc.collect()
    assert all(producer.exported == len(producer.deleted) == 1 for producer in producers.values())


def test_refused_operands_are_given_back():
    producers = {name: Producer(array) for name, array in small_problem().items()}
    producers["b"] = Producer(numbers())
    with pytest.raises(OperandError):
        kda(**producers)
    gc.collect()
    assert all(producer.exported == len(producer.deleted) for producer in producers.values())


def test_bound_calls_keep_their_operands_alive(torch):
    problem = small_problem()
    call = bind(kda, **to(problem, torch))
    gc.collect()
    rubbish = [
        torch.full_like(to_library(array, torch), -1) for array in problem.values()
    ]  # reuses what is free
    out, state = call()
    wanted_out, wanted_state = expected("kda", problem)
    assert same_bits(out, wanted_out)
    assert same_bits(state, wanted_state)
    assert len(rubbish) == len(problem)


def peak_kib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_ten_thousand_conversions_leave_memory_flat(torch):
    """A megabyte each: one in a hundred lost would show."""
    for _ in range(100):
        bridge.adopt("a", torch.empty(250_000))
    before = peak_kib()
    for _ in range(10_000):
        bridge.adopt("a", torch.empty(250_000))
    assert peak_kib() - before < 50_000
    existing = len(alive)
    producer = Producer(numbers())
    for _ in range(10_000):
        bridge.adopt("a", producer)
    assert len(producer.deleted) == 10_000
    assert len(alive) == existing


def test_ten_thousand_unused_capsules_leave_memory_flat():
    """F9: what is exported and then refused."""
    producer = Producer(numbers(), flags=1)
    for _ in range(10_000):
        with pytest.raises(OperandError):
            bridge.adopt("out", producer, written=True)
    assert len(producer.deleted) == 10_000


def test_conversions_in_four_threads():
    producers = [Producer(numbers((50, 50))) for _ in range(3)]
    wrong = []

    def work():
        for turn in range(2000):
            if bridge.adopt("a", producers[turn % 3])[7, 7] != 358:
                wrong.append(turn)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert sum(len(producer.deleted) for producer in producers) == 8000


# Overlaps and devices


def test_an_out_inside_the_pool_is_refused_through_dlpack(torch):
    problem = small_problem(dtype="float32")
    theirs = to(problem, torch)
    before = to(problem, np)
    out = theirs["initial_state"][0].as_strided(out_shape(problem), (32, 32, 8, 1))
    refused(lambda: kda(**theirs, out=out), OperandError, "KDA-ARRAY-OVERLAP", "out")
    assert unchanged(theirs, before)


def test_a_mixture_of_host_and_device_is_refused_by_name():
    """F5. Known before anything is exported, and so on a machine without a GPU too."""
    problem = small_problem()
    before = to(problem, np)
    on_gpu = Producer(problem["a"], device=(2, 0))
    message = refused(
        lambda: kda(**problem | {"a": on_gpu}), DeviceError, "KDA-ARRAY-HOST-ON-DEVICE", "mixed_qkv"
    )
    assert "`a`" in message
    assert "cuda:0" in message
    assert on_gpu.exported == 0
    assert unchanged(problem, before)


@pytest.mark.parametrize("lone", ["mixed_qkv", "b", "ssm_state_indices", "initial_state"])
def test_the_operand_in_host_memory_is_the_one_named(lone):
    problem = small_problem()
    theirs = {name: Producer(array, device=(13, 1)) for name, array in problem.items()}
    refused(lambda: kda(**theirs | {lone: problem[lone]}), DeviceError, "KDA-ARRAY-HOST-ON-DEVICE", lone)
    assert all(producer.exported == 0 for producer in theirs.values())


def test_adopt_all_leaves_out_what_is_none():
    array = numbers()
    adopted = bridge.adopt_all({"a": array, "b": None, "out": Producer(numbers())}, written=("out",))
    assert adopted["a"] is array
    assert adopted["b"] is None
    assert same_bits(adopted["out"], numbers())
    read_only = Producer(numbers(), flags=1)
    with pytest.raises(OperandError):
        bridge.adopt_all({"a": array, "out": read_only}, written=("out",))


@pytest.mark.skipif(
    choose_backend()[0] == "cuda", reason="there is a GPU, which the fake array does not live on"
)
def test_device_arrays_without_a_gpu_to_use_them_on():
    theirs = {name: Producer(array, device=(2, 0)) for name, array in small_problem().items()}
    with pytest.raises(NoGpuError):
        kda(**theirs)


@pytest.mark.parametrize("device_type", [4, 7, 8, 10, 14])
def test_devices_of_other_kinds_are_refused(device_type):
    elsewhere = Producer(numbers(), device=(device_type, 0))
    message = refused(lambda: bridge.adopt("a", elsewhere), BridgeError, "KDA-ARRAY-KIND", "a")
    assert f"type {device_type}" in message
    assert elsewhere.exported == 0


def test_pinned_host_memory_is_host_memory():
    assert same_bits(bridge.adopt("a", Producer(numbers(), device=(3, 0))), numbers())


def test_native_arrays_come_back_as_they_are():
    array = numbers()
    assert bridge.adopt("a", array) is array
    assert bridge.is_native(array)
    assert not bridge.is_native(Producer(array))
    assert bridge.all_native([array, None])
    assert not bridge.all_native([array, None, Producer(array)])
