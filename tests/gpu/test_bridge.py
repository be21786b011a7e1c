# SPDX-License-Identifier: Apache-2.0
"""torch and JAX arrays on the GPU: types, bits, memory, and who waits for whom.

Whatever the arrays come from, the bits must be those of the call with CuPy arrays. Nothing in a test of stream order
synchronises before the answer is on its way: a spinning kernel keeps one side busy, and the buffers hold something
wrong until it ends.
"""

import gc
import os
import sys
import weakref

import numpy as np
import pytest
from mtp_problems import commit_operands, make_mtp
from problems import POISON, make_problem, out_shape, same_bits, to, to_host, to_library
from producers import Producer

from kda_cupy import (
    BridgeError,
    DeviceError,
    OperandError,
    StatePool,
    bind,
    bridge,
    is_valid_state,
    kda_commit,
    kda_decode_mtp,
)
from kda_cupy import gdn_packed_decode as gdn
from kda_cupy import kda_packed_decode as kda

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # or JAX takes most of the GPU

cupy = pytest.importorskip("cupy")

OPERATIONS = {"kda": kda, "gdn": gdn}
DTYPES = ("bfloat16", "float16", "float32")
INPUTS = ("mixed_qkv", "a", "b", "A_log", "dt_bias", "ssm_state_indices")
SPIN_CYCLES = 40_000_000  # about 20 ms: far longer than a call takes the host
ROUNDS = 100

SPIN = r"""
extern "C" __global__ void spin(long long cycles) {
    for (long long start = clock64(); clock64() - start < cycles;) {}
}
"""


@pytest.fixture
def cuda_torch(torch):
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    yield torch
    torch.cuda.synchronize()


@pytest.fixture
def cuda_jax(jax):
    """JAX, and its GPU."""
    try:
        device = jax.devices("cuda")[0]
    except RuntimeError as error:
        pytest.skip(f"this JAX has no CUDA ({str(error).splitlines()[0]})")
    return jax, device


@pytest.fixture(scope="module")
def spin():
    kernel = cupy.RawKernel(SPIN, "spin")
    kernel((1,), (1,), (np.int64(1),))  # compile
    cupy.cuda.Device().synchronize()
    return lambda: kernel((1,), (1,), (np.int64(SPIN_CYCLES),))


def problem_of(op="kda", dtype="bfloat16", **changes):
    return make_problem(op, **({"B": 6, "H": 2, "HV": 4, "dtype": dtype} | changes))


def expected(op, problem):
    """Output and state of the call with CuPy arrays, on a copy of the problem, as NumPy arrays."""
    out, state = OPERATIONS[op](**to(problem, cupy))
    return to_host(out), to_host(state)


def refused(call, error, code, operand):
    with pytest.raises(error) as caught:
        call()
    assert (caught.value.code, caught.value.operand) == (code, operand)
    return str(caught.value)


def poisoned(tensor):
    return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor.fill_(-1)


# Types and bits


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row_padding", [0, 8])
def test_torch(cuda_torch, op, dtype, row_padding):
    problem = problem_of(op, dtype, row_padding=row_padding, index_dtype="int64")
    theirs = to(problem, cuda_torch, "cuda")
    out, state = OPERATIONS[op](**theirs)
    wanted_out, wanted_state = expected(op, problem)
    assert type(out) is cuda_torch.Tensor
    assert out.dtype is getattr(cuda_torch, dtype)
    assert out.device == theirs["mixed_qkv"].device
    assert state is theirs["initial_state"]
    assert same_bits(out, wanted_out)
    assert same_bits(state, wanted_state)
    for name in INPUTS:
        assert same_bits(theirs[name], problem[name]), name


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_jax(cuda_jax, op, dtype):
    """JAX arrays as inputs; the pool is written in place, so it is CuPy's."""
    jax, device = cuda_jax
    problem = problem_of(op, dtype)
    theirs = to({name: problem[name] for name in INPUTS}, jax, device)
    pool = to_library(problem["initial_state"], cupy)
    out, state = OPERATIONS[op](**theirs, initial_state=pool)
    wanted_out, wanted_state = expected(op, problem)
    assert isinstance(out, jax.Array)
    assert out.devices() == {device}
    assert out.dtype == dtype
    assert state is pool
    assert same_bits(out, wanted_out)
    assert same_bits(state, wanted_state)
    assert same_bits(out * 1, wanted_out)  # JAX computes with it


def test_jax_inputs_on_a_torch_pool(cuda_jax, cuda_torch):
    jax, device = cuda_jax
    problem = problem_of()
    pool = to_library(problem["initial_state"], cuda_torch, "cuda")
    out, state = kda(**to({name: problem[name] for name in INPUTS}, jax, device), initial_state=pool)
    wanted_out, wanted_state = expected("kda", problem)
    assert isinstance(out, jax.Array)
    assert state is pool
    assert same_bits(out, wanted_out)
    assert same_bits(state, wanted_state)


def test_torch_out_and_gradients(cuda_torch):
    problem = problem_of()
    theirs = to(problem, cuda_torch, "cuda")
    for name in ("mixed_qkv", "a", "b", "A_log", "dt_bias"):
        theirs[name].requires_grad_()
    theirs["initial_state"] = cuda_torch.nn.Parameter(theirs["initial_state"])
    out = cuda_torch.full(out_shape(problem), float("nan"), dtype=cuda_torch.bfloat16, device="cuda")
    returned, state = kda(**theirs, out=out)
    wanted_out, wanted_state = expected("kda", problem)
    assert returned is out
    assert state is theirs["initial_state"]
    assert same_bits(out, wanted_out)
    assert same_bits(state, wanted_state)
    state.data.copy_(to_library(problem["initial_state"], cuda_torch, "cuda"))
    fresh, _ = kda(**theirs)
    assert not fresh.requires_grad
    assert same_bits(fresh, wanted_out)


def test_cupy_operands_with_a_torch_out(cuda_torch):
    problem = problem_of()
    out = cuda_torch.empty(out_shape(problem), dtype=cuda_torch.bfloat16, device="cuda")
    assert kda(**to(problem, cupy), out=out)[0] is out
    assert same_bits(out, expected("kda", problem)[0])


@pytest.mark.parametrize("dtype", [*DTYPES, "int32", "int64"])
def test_nothing_is_copied(cuda_torch, dtype):
    """F1: bfloat16 too."""
    tensor = cuda_torch.arange(60, device="cuda").reshape(6, 10).to(getattr(cuda_torch, dtype))[1::2, 2:7]
    view = bridge.adopt("a", tensor)
    assert isinstance(view, cupy.ndarray)
    assert view.data.ptr == tensor.data_ptr()
    assert view.data.device_id == tensor.device.index
    assert [stride // view.itemsize for stride in view.strides] == list(tensor.stride())
    assert same_bits(view, tensor)
    view[1, 2] = 77
    cupy.cuda.Device().synchronize()
    assert tensor[1, 2] == 77


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_is_copied_from_jax(cuda_jax, dtype):
    jax, device = cuda_jax
    array = jax.device_put(np.arange(6, dtype=np.float32).reshape(2, 3), device).astype(dtype)
    view = bridge.adopt("a", array)
    assert view.data.ptr == array.unsafe_buffer_pointer()
    assert same_bits(view, array)


def test_an_empty_batch_of_torch(cuda_torch):
    problem = problem_of(B=0)
    out, _ = kda(**to(problem, cuda_torch, "cuda"))
    assert type(out) is cuda_torch.Tensor
    assert out.shape == out_shape(problem)


def test_an_empty_batch_of_jax(cuda_jax):
    jax, device = cuda_jax
    problem = problem_of(B=0)
    theirs = to({name: problem[name] for name in INPUTS}, jax, device)
    out, _ = kda(**theirs, initial_state=to_library(problem["initial_state"], cupy))
    assert isinstance(out, jax.Array)
    assert out.shape == out_shape(problem)


def test_one_row_of_a_wider_buffer(cuda_torch):
    """C6: a row's stride is never stepped along when there is one row."""
    problem = problem_of(B=1, row_padding=3)
    out, _ = kda(**to(problem, cuda_torch, "cuda"))
    assert same_bits(out, expected("kda", problem)[0])
    assert same_bits(out, expected("kda", problem_of(B=1))[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_producer_needs_no_ml_dtypes(cuda_torch, monkeypatch, dtype):
    """F1: torch has a bfloat16 of its own; only we need NumPy's."""
    problem = problem_of(dtype=dtype)
    wanted_out, wanted_state = expected("kda", problem)
    theirs = to(problem, cuda_torch, "cuda")
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    out, state = kda(**theirs)
    monkeypatch.undo()
    assert same_bits(out, wanted_out)
    assert same_bits(state, wanted_state)


# Any library


class OnGpu(Producer):
    """A CuPy array as a library of our own exports it, from a stream of its own."""

    def __init__(self, array, known, stream=None, **fields):
        name = b"dltensor_versioned" if "max_version" in known else b"dltensor"
        likeness = np.lib.stride_tricks.as_strided(np.zeros(1, array.dtype), array.shape, array.strides)
        place = {"data": array.data.ptr, "device": (2, array.data.device_id)}
        super().__init__(likeness, name, **place | fields)
        self.keep, self.known, self.stream = array, known, stream

    def __dlpack__(self, *, stream, **keywords):
        if keywords.keys() - self.known:
            raise TypeError(f"unexpected keywords {keywords.keys() - self.known}")
        if self.stream is not None:
            event = self.stream.record()  # it has to live until the stream has been told of it
            cupy.cuda.runtime.streamWaitEvent(stream, event.ptr)
        return super().__dlpack__(stream=stream)


KNOWN = {"old": set(), "early": {"max_version"}, "new": {"max_version", "copy", "dl_device"}}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("age", KNOWN)
def test_any_producer(age, dtype):
    problem = problem_of(dtype=dtype, row_padding=4)
    wanted_out, wanted_state = expected("kda", problem)
    arrays = to(problem, cupy)
    theirs = {name: OnGpu(array, KNOWN[age]) for name, array in arrays.items()}
    out, state = kda(**theirs)
    assert isinstance(out, cupy.ndarray)
    assert state is theirs["initial_state"]
    assert same_bits(out, wanted_out)
    assert same_bits(arrays["initial_state"], wanted_state)


def test_odd_strides_of_one_row_and_read_only_memory():
    """C6, F6: the stride of an axis that is never stepped along may be anything; inputs may be read-only."""
    problem = problem_of(B=1)
    wanted_out, wanted_state = expected("kda", problem)
    arrays, new = to(problem, cupy), KNOWN["new"]
    theirs = {name: OnGpu(array, new, flags=1) for name, array in arrays.items() if name in INPUTS}
    theirs["mixed_qkv"] = OnGpu(arrays["mixed_qkv"], new, flags=1, strides=(2**62 - 1, 1))
    theirs["ssm_state_indices"] = OnGpu(arrays["ssm_state_indices"], new, flags=1, strides=(-3,))
    read_only = OnGpu(arrays["initial_state"], new, flags=1)
    refused(
        lambda: kda(**theirs, initial_state=read_only),
        OperandError,
        "KDA-ARRAY-READ-ONLY",
        "initial_state",
    )
    out, state = kda(**theirs, initial_state=arrays["initial_state"])
    assert same_bits(out, wanted_out)
    assert same_bits(state, wanted_state)


# Pools


def test_a_wrapped_torch_pool_is_updated_in_place(cuda_torch):
    problem = problem_of(slots=[3, 1, 2, 5, 7, 4], slot_padding=64)
    HV, V, K = problem["initial_state"].shape[1:]
    wide = cuda_torch.full((9, HV * V * K + 64), POISON, device="cuda")
    theirs = wide[:, : HV * V * K].view(9, HV, V, K)
    theirs.copy_(to_library(problem["initial_state"], cuda_torch, "cuda"))
    pool = StatePool.wrap(theirs)
    assert pool[0].data.ptr == theirs.data_ptr()
    out, state = kda(**to(problem, cuda_torch, "cuda") | {"initial_state": pool[0]})
    cupy.cuda.Device().synchronize()
    wanted_out, wanted_state = expected("kda", problem)
    assert type(out) is cuda_torch.Tensor
    assert state.data.ptr == theirs.data_ptr()
    assert same_bits(out, wanted_out)
    assert same_bits(theirs, wanted_state)
    slot = pool.allocate()
    cupy.cuda.Device().synchronize()
    assert not theirs[slot].any()
    assert same_bits(theirs[slot + 1 :], wanted_state[slot + 1 :])
    assert (wide[:, HV * V * K :] == POISON).all()


def test_a_wrapped_pool_keeps_its_memory(cuda_torch):
    pool = StatePool.wrap(cuda_torch.full((5, 2, 8, 64), 7.0, device="cuda"))
    cuda_torch.full((5, 2, 8, 64), -1.0, device="cuda")
    cuda_torch.cuda.synchronize()
    assert (pool.state == 7).all()


def test_states_of_torch_are_checked_like_any(cuda_torch):
    state = cuda_torch.zeros(5, 2, 8, 64, device="cuda")
    assert is_valid_state(state, 2)
    assert not is_valid_state(state.swapaxes(2, 3), 2)
    assert not is_valid_state(state.half(), 2)


def test_states_of_jax_are_never_valid(cuda_jax):
    jax, device = cuda_jax
    assert not is_valid_state(jax.device_put(np.zeros((5, 2, 8, 64), np.float32), device), 2)


@pytest.mark.parametrize("written", ["initial_state", "out"])
def test_jax_arrays_are_refused_where_something_is_written(cuda_jax, written):
    jax, device = cuda_jax
    problem = problem_of()
    problem["out"] = np.full(out_shape(problem), 7, problem["mixed_qkv"].dtype)
    theirs = to(problem, cupy)
    theirs[written] = jax.device_put(problem[written], device)
    refused(lambda: kda(**theirs), OperandError, "KDA-ARRAY-READ-ONLY", written)
    for name, array in problem.items():
        assert same_bits(theirs[name], array), name


# Mixtures


@pytest.mark.parametrize("lone", ["mixed_qkv", "a", "A_log", "initial_state", "ssm_state_indices"])
def test_one_numpy_operand_is_refused_by_name(lone):
    """F5."""
    problem = problem_of()
    theirs = to(problem, cupy) | {lone: problem[lone]}
    message = refused(lambda: kda(**theirs), DeviceError, "KDA-ARRAY-HOST-ON-DEVICE", lone)
    assert "host memory" in message
    for name, array in problem.items():
        assert same_bits(theirs[name], array), name


@pytest.mark.parametrize("lone", ["mixed_qkv", "b", "initial_state"])
@pytest.mark.parametrize("others", ["cupy", "torch"])
def test_one_tensor_in_host_memory_is_refused_by_name(cuda_torch, lone, others):
    problem = problem_of()
    theirs = to(problem, cupy) if others == "cupy" else to(problem, cuda_torch, "cuda")
    theirs[lone] = to_library(problem[lone], cuda_torch)
    refused(lambda: kda(**theirs), DeviceError, "KDA-ARRAY-HOST-ON-DEVICE", lone)


def test_one_tensor_on_the_gpu_is_refused_too(cuda_torch):
    problem = problem_of()
    theirs = problem | {"b": to_library(problem["b"], cuda_torch, "cuda")}
    message = refused(lambda: kda(**theirs), DeviceError, "KDA-ARRAY-HOST-ON-DEVICE", "mixed_qkv")
    assert "`b`" in message


# Who waits for whom


def streams_of(torch):
    """A stream of torch's and one of ours, neither of which waits for the default stream."""
    return torch.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)


def copy_over(torch, targets, sources):
    """Queue the real contents on torch's current stream."""
    for name, source in sources.items():
        if isinstance(source, torch.Tensor):
            targets[name].copy_(source)


def wrong_copies(torch, sources):
    """Tensors like these, of the wrong contents (slots: padding)."""
    return {
        name: poisoned(value.clone()) if isinstance(value, torch.Tensor) else value
        for name, value in sources.items()
    }


def test_our_stream_waits_for_what_torch_has_queued(cuda_torch):
    torch = cuda_torch
    problem = problem_of()
    wanted_out, wanted_state = expected("kda", problem)
    right = to(problem, torch, "cuda")
    kda(**to(problem, torch, "cuda"))  # compile
    theirs_stream, ours = streams_of(torch)
    for round_ in range(ROUNDS):
        theirs = wrong_copies(torch, right)
        out = torch.full(out_shape(problem), 7.0, dtype=torch.bfloat16, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(theirs_stream), ours:
            torch.cuda._sleep(SPIN_CYCLES)
            copy_over(torch, theirs, right)
            queued = theirs_stream.record_event()
            kda(**theirs, out=out)
            assert not queued.query(), "the producer was done too early for this to mean anything"
        ours.synchronize()
        assert same_bits(out, wanted_out), round_
        assert same_bits(theirs["initial_state"], wanted_state), round_


@pytest.mark.parametrize("age", KNOWN)
def test_our_stream_waits_for_what_any_producer_has_queued(age, spin):
    problem = problem_of()
    wanted_out, wanted_state = expected("kda", problem)
    right = to(problem, cupy)
    wrong = {
        name: np.full_like(problem[name], -1 if name == "ssm_state_indices" else np.nan) for name in INPUTS
    }
    theirs_stream, ours = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    for round_ in range(ROUNDS):
        arrays = {name: to_library(wrong[name], cupy) for name in INPUTS}
        state = to_library(problem["initial_state"], cupy)
        out = to_library(np.full(out_shape(problem), 7, problem["mixed_qkv"].dtype), cupy)
        cupy.cuda.Device().synchronize()
        with theirs_stream:
            spin()
            for name, array in arrays.items():
                array.data.copy_from_device_async(right[name].data, array.nbytes)
        with ours:
            theirs = {name: OnGpu(array, KNOWN[age], theirs_stream) for name, array in arrays.items()}
            kda(**theirs, initial_state=state, out=out)
        assert not theirs_stream.done, "the producer was done too early for this to mean anything"
        ours.synchronize()
        assert same_bits(out, wanted_out), round_
        assert same_bits(state, wanted_state), round_


def test_verify_and_commit_wait_and_are_waited_for(cuda_torch):
    """One chain over two streams, in which nobody synchronises: torch, verify, commit, torch."""
    torch = cuda_torch
    problem = make_mtp(3, 4, 1, 2)
    accept = np.array([4, 0, 2], np.int32)

    def run(operands, counts):
        out = kda_decode_mtp(**operands)
        kda_commit(**commit_operands(operands, accept) | {"accept_lens": counts})
        return out, operands["recurrent_state"]

    wanted = [to_host(array) for array in run(to(problem, cupy), cupy.asarray(accept))]
    right, counts = to(problem, torch, "cuda"), torch.tensor(accept, device="cuda")
    clones = {n: value.clone() if isinstance(value, torch.Tensor) else value for n, value in right.items()}
    run(clones, counts)  # compile, for the layouts that clones have
    torch.cuda.synchronize()
    theirs_stream, ours = streams_of(torch)
    for round_ in range(ROUNDS // 4):
        theirs = wrong_copies(torch, right)
        torch.cuda.synchronize()
        with torch.cuda.stream(theirs_stream), ours:
            torch.cuda._sleep(SPIN_CYCLES)
            copy_over(torch, theirs, right)
            queued = theirs_stream.record_event()
            seen = [array.clone() for array in run(theirs, counts)]
            assert not queued.query(), "the producer was done too early for this to mean anything"
        theirs_stream.synchronize()
        assert same_bits(seen[0], wanted[0]), round_
        assert same_bits(seen[1], wanted[1]), round_


def test_torch_waits_for_what_we_have_queued(cuda_torch, spin):
    torch = cuda_torch
    problem = problem_of()
    wanted_out, wanted_state = expected("kda", problem)
    kda(**to(problem, torch, "cuda"))
    theirs_stream, ours = streams_of(torch)
    for round_ in range(ROUNDS):
        theirs = to(problem, torch, "cuda")
        out = torch.full(out_shape(problem), float("nan"), dtype=torch.bfloat16, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(theirs_stream), ours:
            spin()
            kda(**theirs, out=out)
            assert not ours.done, "our stream was done too early for this to mean anything"
            seen = out.clone(), theirs["initial_state"].clone()
        theirs_stream.synchronize()
        assert same_bits(seen[0], wanted_out), round_
        assert same_bits(seen[1], wanted_state), round_


def test_outputs_that_torch_allocates_are_not_read_early(cuda_torch, spin):
    """As above, without ``out=``: and each round leaves NaN in the memory that the next output may get."""
    torch = cuda_torch
    problem = problem_of()
    wanted_out, _ = expected("kda", problem)
    theirs = to(problem, torch, "cuda")
    kda(**theirs)
    theirs_stream, ours = streams_of(torch)
    for round_ in range(ROUNDS):
        copy_over(torch, theirs, to(problem, torch, "cuda"))
        torch.cuda.synchronize()
        with torch.cuda.stream(theirs_stream), ours:
            spin()
            out, _ = kda(**theirs)
            seen = out.clone()
            poisoned(out)
            del out
        theirs_stream.synchronize()
        assert same_bits(seen, wanted_out), round_


def test_memory_of_temporaries_is_not_reused_while_we_read_it(cuda_torch, spin):
    """F10: made on one stream of torch's, used while another is current, dropped, and their size allocated again."""
    torch = cuda_torch
    problem = problem_of()
    wanted_out, wanted_state = expected("kda", problem)
    right = to(problem, torch, "cuda")
    kda(**to(problem, torch, "cuda"))
    theirs_stream, ours = streams_of(torch)
    for round_ in range(ROUNDS):
        with torch.cuda.stream(theirs_stream):
            temporary = {name: right[name].clone() for name in INPUTS}
        state = to_library(problem["initial_state"], torch, "cuda")
        torch.cuda.synchronize()
        with ours:
            spin()
            out, _ = kda(**temporary, initial_state=state)  # torch's current stream is its default one
        assert not ours.done
        del temporary
        with torch.cuda.stream(theirs_stream):  # which nothing has told to wait
            rubbish = [poisoned(torch.empty_like(right[name])) for name in INPUTS for _ in range(3)]
        theirs_stream.synchronize()
        assert not ours.done, "our stream was done too early for this to mean anything"
        torch.cuda.synchronize()
        assert same_bits(out, wanted_out), round_
        assert same_bits(state, wanted_state), round_
        del rubbish


def slow_one(jax, device):
    """A JAX array holding 1, but only after a while."""
    slow = jax.device_put(np.full((4096, 4096), 1 / 4096, np.float32), device)

    @jax.jit
    def compute(x):
        for _ in range(12):
            x = jax.numpy.matmul(x, x, precision="highest")  # 4096 products of 1 / 4096**2: exact
        return x[0, 0] * 4096

    return lambda: compute(slow)


def test_our_stream_waits_for_what_jax_has_queued(cuda_jax):
    jax, device = cuda_jax
    problem = problem_of(dtype="float32")
    wanted_out, _ = expected("kda", problem)
    theirs = to({name: problem[name] for name in INPUTS}, jax, device)
    one = slow_one(jax, device)
    times = jax.jit(lambda x, y: x * y)
    assert times(theirs["mixed_qkv"], one()).block_until_ready() is not None  # compile
    ours = cupy.cuda.Stream(non_blocking=True)
    busy = 0
    for round_ in range(ROUNDS):
        pool = to_library(problem["initial_state"], cupy)
        out = cupy.full(out_shape(problem), cupy.nan, np.float32)
        cupy.cuda.Device().synchronize()
        with ours:
            later = times(theirs["mixed_qkv"], one())
            kda(**theirs | {"mixed_qkv": later}, initial_state=pool, out=out)
            busy += not later.is_ready()
        ours.synchronize()
        assert same_bits(out, wanted_out), round_
    assert busy, "JAX was always done before the call returned: this has shown nothing"


def test_jax_waits_for_what_we_have_queued(cuda_jax, spin):
    jax, device = cuda_jax
    problem = problem_of(dtype="float32")
    wanted_out, _ = expected("kda", problem)
    theirs = to({name: problem[name] for name in INPUTS}, jax, device)
    double = jax.jit(lambda x: x * 2)
    double(jax.device_put(wanted_out, device)).block_until_ready()  # compile
    ours = cupy.cuda.Stream(non_blocking=True)
    for round_ in range(ROUNDS):
        pool = to_library(problem["initial_state"], cupy)
        cupy.cuda.Device().synchronize()
        with ours:
            rubbish = cupy.full(
                out_shape(problem), cupy.nan, np.float32
            )  # what the output's memory will hold
            del rubbish
            spin()
            out, _ = kda(**theirs, initial_state=pool)
            assert not ours.done, "our stream was done too early for this to mean anything"
            doubled = double(out)
        assert same_bits(doubled, wanted_out * 2), round_


def test_memory_of_results_is_not_reused_while_jax_reads_it(cuda_jax):
    """The next output must not land where JAX still reads the last one."""
    jax, device = cuda_jax
    first, second = problem_of(dtype="float32", seed=1), problem_of(dtype="float32", seed=2)
    wanted = expected("kda", first)[0]
    theirs = [to({name: problem[name] for name in INPUTS}, jax, device) for problem in (first, second)]
    one = slow_one(jax, device)
    times = jax.jit(lambda x, y: x * y)
    times(jax.device_put(wanted, device), one()).block_until_ready()
    ours = cupy.cuda.Stream(non_blocking=True)
    for round_ in range(ROUNDS):
        pools = [to_library(problem["initial_state"], cupy) for problem in (first, second)]
        cupy.cuda.Device().synchronize()
        with ours:
            out, _ = kda(**theirs[0], initial_state=pools[0])
            later = times(out, one())
            del out
            for _ in range(3):
                kda(**theirs[1], initial_state=pools[1])
        assert same_bits(later, wanted), round_


def test_memory_of_jax_temporaries_is_not_reused_while_we_read_it(cuda_jax, spin):
    """F10: dropped right after the call, on a stream that JAX knows nothing of, and their size allocated again."""
    jax, device = cuda_jax
    problem = problem_of(dtype="float32")
    wanted_out, wanted_state = expected("kda", problem)
    inputs = {name: problem[name] for name in INPUTS}
    rubbish_like = [np.full_like(value, -1) for value in inputs.values()]
    jax.block_until_ready(jax.device_put(rubbish_like, device))
    ours = cupy.cuda.Stream(non_blocking=True)
    for round_ in range(ROUNDS // 4):
        temporary = to(inputs, jax, device)
        pool = to_library(problem["initial_state"], cupy)
        out = cupy.full(out_shape(problem), cupy.nan, np.float32)
        jax.block_until_ready(temporary)
        cupy.cuda.Device().synchronize()
        with ours:
            spin()
            kda(**temporary, initial_state=pool, out=out)
        del temporary
        rubbish = [jax.device_put(value, device) for value in rubbish_like for _ in range(2)]
        jax.block_until_ready(rubbish)
        assert not ours.done, "our stream was done too early for this to mean anything"
        ours.synchronize()
        assert same_bits(out, wanted_out), round_
        assert same_bits(pool, wanted_state), round_
        del rubbish


def test_the_per_thread_stream_is_refused_by_torch(cuda_torch):
    """F8: torch cannot order its work on stream 2."""
    tensor = cuda_torch.ones(3, device="cuda")
    with cupy.cuda.Stream.ptds:
        message = refused(lambda: bridge.adopt("a", tensor), BridgeError, "KDA-ARRAY-KIND", "a")
    assert "per-thread" in message


# Graphs


def replay(graph, stream):
    cupy.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()


@pytest.mark.parametrize("bound", [True, False], ids=["bound", "plain"])
def test_a_captured_call_uses_what_torch_wrote_since(cuda_torch, bound):
    torch = cuda_torch
    problem, other = problem_of(seed=1), problem_of(seed=2, slots=[1, 2, -1, 4, 8, 3])
    theirs = to(problem, torch, "cuda")
    out = torch.full(out_shape(problem), float("nan"), dtype=torch.bfloat16, device="cuda")
    call = bind(kda, **theirs, out=out)
    kda(**to(problem, torch, "cuda"), out=out)  # everything is compiled and loaded
    torch.cuda.synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        call() if bound else kda(**theirs, out=out)
        graph = stream.end_capture()
    assert same_bits(theirs["initial_state"], problem["initial_state"])  # captured, not run
    for contents in (problem, other, problem):
        copy_over(torch, theirs, to(contents, torch, "cuda"))
        poisoned(out)
        replay(graph, stream)
        wanted_out, wanted_state = expected("kda", contents)
        assert same_bits(out, wanted_out)
        assert same_bits(theirs["initial_state"], wanted_state)


class OfTorch:
    """A torch stream by the protocol that CuPy reads."""

    def __init__(self, stream):
        self.stream = stream

    def __cuda_stream__(self):
        return (0, self.stream.cuda_stream)


def test_torch_captures_a_bound_call(cuda_torch):
    torch = cuda_torch
    problem, other = problem_of(seed=1), problem_of(seed=2)
    theirs = to(problem, torch, "cuda")
    call = bind(kda, **theirs)
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), cupy.cuda.Stream.from_external(OfTorch(torch.cuda.current_stream())):
        call()
    for contents in (other, problem):
        copy_over(torch, theirs, to(contents, torch, "cuda"))
        poisoned(call.out)
        graph.replay()
        torch.cuda.synchronize()
        wanted_out, wanted_state = expected("kda", contents)
        assert same_bits(call.out, wanted_out)
        assert same_bits(theirs["initial_state"], wanted_state)


def test_jax_inputs_in_a_captured_call(cuda_jax):
    """JAX takes DLPack's number for "no ordering" for a stream, so it is not given that number."""
    jax, device = cuda_jax
    problem = problem_of()
    theirs = to({name: problem[name] for name in INPUTS}, jax, device)
    pool = to_library(problem["initial_state"], cupy)
    out = to_library(np.full(out_shape(problem), np.nan, problem["mixed_qkv"].dtype), cupy)
    wanted_out, wanted_state = expected("kda", problem)
    jax.block_until_ready(theirs)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        kda(**theirs, initial_state=pool, out=out)
        graph = stream.end_capture()
    replay(graph, stream)
    assert same_bits(out, wanted_out)
    assert same_bits(pool, wanted_state)


# Lifetime


def test_a_view_keeps_the_memory_of_a_tensor(cuda_torch):
    torch = cuda_torch
    tensor = torch.full((1000, 1000), 7.0, device="cuda")
    alive = weakref.ref(tensor)
    part = bridge.adopt("a", tensor)[3:, ::2]
    del tensor
    torch.full((1000, 1000), -1.0, device="cuda")
    cupy.cuda.Device().synchronize()
    assert (part == 7).all()
    gc.collect()
    assert alive() is not None
    del part
    gc.collect()
    assert alive() is None


def test_ten_thousand_conversions_leave_memory_flat(cuda_torch):
    torch = cuda_torch
    torch.cuda.synchronize()
    gc.collect()
    before, peak = torch.cuda.memory_allocated(), 0
    for _ in range(10_000):
        bridge.adopt("a", torch.empty(250_000, device="cuda"))
        peak = max(peak, torch.cuda.memory_allocated())
    gc.collect()
    assert peak - before < 10_000_000
    assert torch.cuda.memory_allocated() == before


def test_two_hundred_calls_leave_memory_flat(cuda_torch):
    """Operands live until the GPU is done with them, and the next call looks."""
    torch = cuda_torch
    problem = problem_of()
    right = to(problem, torch, "cuda")
    kda(**right)
    torch.cuda.synchronize()
    kda(**right)
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(200):
        kda(**{name: right[name].clone() for name in INPUTS}, initial_state=right["initial_state"])
        torch.cuda.synchronize()
    kda(**right)
    gc.collect()
    assert torch.cuda.memory_allocated() == before


# Several GPUs


def test_tensors_on_another_gpu_than_the_current_one(cuda_torch):
    """torch exports from its current device only; the call goes to the operands' device and comes back."""
    torch = cuda_torch
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    problem = problem_of()
    wanted_out, wanted_state = expected("kda", problem)
    theirs = to(problem, torch, "cuda:1")
    out, state = kda(**theirs)
    assert out.device == torch.device("cuda:1")
    assert same_bits(out, wanted_out)
    assert same_bits(state, wanted_state)
    assert torch.cuda.current_device() == 0
    assert cupy.cuda.runtime.getDevice() == 0
