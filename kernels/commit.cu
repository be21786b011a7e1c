// SPDX-License-Identifier: Apache-2.0
// Commit: n tokens of a verify become permanent. All layers in one launch.
//
// From snapshots, the state after token n - 1 is copied. From rings it is walked there again: what the verify left is
// act(k), act(v), log decays and betas, from which kernels/chain.cuh gives the corrections u of all n tokens at once
// (one product with the state as it was), and then
//
//   S <- S exp(g_j) + u_j k_j^T       for j = 0 .. n - 1, in registers
//
// by the very instructions with which a verify makes its snapshots: both ways to the same bits.
//
// One block is one value head of one request of one layer: 8 warps, 16 value rows each, the state in registers.
// Bytes a head: 64 KiB read, 64 KiB written, 1 KiB a token; the floor is the yardstick RW.
//
// n = 0 leaves everything as it is. So does a count, slot, row or step out of range, which is recorded; a slot
// <= null_index is padding. The conv history becomes the window after token n - 1. A tracking slot receives what state and
// history are after step s.

#include "memory.cuh"
#include "warp.cuh"
#include "guard.cuh"
#include "tf32.cuh"
#include "chain.cuh"

// Mirrors CommitPointers and CommitLayout in kda_cupy/ops/mtp_params.py, field by field; arrays of three are q, k, v.
struct CommitParams {
    const void* accept_lens;
    const void* ssm_state_indices;
    const void* intermediate_state_indices;
    const void* ring_indices;
    const void* track_indices;
    const void* track_steps;
    float* recurrent_state;
    const float* intermediate_ssm;
    const KDA_ACTIVATION* ring_v;
    const KDA_ACTIVATION* ring_k;
    const float* ring_g;
    const float* ring_beta;
    KDA_ACTIVATION* cs[3];
    const KDA_ACTIVATION* windows[3];
    ErrorRecord* errors;
    long long first_request;
    long long state_layer_stride, state_slot_stride, snapshot_layer_stride, snapshot_row_stride,
        snapshot_step_stride;
    long long ring_v_layer_stride, ring_v_slot_stride, ring_v_head_stride;
    long long ring_k_layer_stride, ring_k_slot_stride, ring_k_head_stride;
    long long ring_g_layer_stride, ring_g_slot_stride, ring_beta_layer_stride, ring_beta_slot_stride;
    long long cs_layer_stride[3], cs_slot_stride[3], cs_channel_stride[3], cs_tap_stride[3];
    long long window_layer_stride[3], window_row_stride[3], window_step_stride[3], window_channel_stride[3],
        window_tap_stride[3];
    long long accept_stride, slot_index_stride, scratch_index_stride, ring_index_stride, track_index_stride,
        track_step_stride;
    long long slots, scratch_rows, ring_rows;
    int max_tokens, ring_steps, group, null_index;
    int accept_is_64bit, slot_index_is_64bit, scratch_index_is_64bit, ring_index_is_64bit,
        track_index_is_64bit, track_step_is_64bit;
    int normalize_k, split_log2, operation;
};

namespace {

constexpr int kTokens = KDA_TOKENS;  // room for tokens: 8 or 16

static_assert(sizeof(CommitParams) == KDA_PARAMS_BYTES, "host and device disagree about the parameters");
static_assert(sizeof(Chain<kTokens, 1>) == KDA_SHARED_BYTES, "host and device disagree about shared memory");

struct Move {
    long long slot, scratch, ring, track_slot, track_step, accepted;
};

// False if there is nothing to do; the first fault of a request is noted once. Operand numbers: OPERANDS in mtp_params.py.
__device__ __forceinline__ bool plan_move(const CommitParams& params, long long row, bool speaks,
                                          Move& move) {
    move.slot =
        load_index(params.ssm_state_indices, params.slot_index_is_64bit, row * params.slot_index_stride);
    move.accepted = load_index(params.accept_lens, params.accept_is_64bit, row * params.accept_stride);
    if (move.slot <= params.null_index) return false;
    const bool needs_scratch = params.intermediate_ssm || params.cs[0];
    move.scratch = needs_scratch
                       ? load_index(params.intermediate_state_indices, params.scratch_index_is_64bit,
                                    row * params.scratch_index_stride)
                       : 0;
    move.ring =
        params.ring_v && params.ring_indices
            ? load_index(params.ring_indices, params.ring_index_is_64bit, row * params.ring_index_stride)
            : move.slot;
    move.track_slot = 0, move.track_step = -1;
    if (params.track_indices) {
        move.track_slot =
            load_index(params.track_indices, params.track_index_is_64bit, row * params.track_index_stride);
        move.track_step =
            load_index(params.track_steps, params.track_step_is_64bit, row * params.track_step_stride);
        if (move.track_slot <= params.null_index) move.track_step = -1;
    }
    int operand = -1;
    long long value = 0, limit = 0;
    if (move.slot >= params.slots)
        operand = 0, value = move.slot, limit = params.slots;
    else if (move.accepted < 0 || move.accepted > params.max_tokens)
        operand = 4, value = move.accepted, limit = params.max_tokens;
    else if (move.accepted == 0)
        return false;
    else if (needs_scratch && (move.scratch < 0 || move.scratch >= params.scratch_rows))
        operand = 2, value = move.scratch, limit = params.scratch_rows;
    else if (params.ring_v && (move.ring < 0 || move.ring >= params.ring_rows))
        operand = 3, value = move.ring, limit = params.ring_rows;
    else if (move.track_step >= 0 && move.track_slot >= params.slots)
        operand = 5, value = move.track_slot, limit = params.slots;
    else if (move.track_step >= move.accepted)
        operand = 6, value = move.track_step, limit = move.accepted;
    if (operand < 0) return true;
    if (speaks) record_error(params.errors, params.operation, operand, row, value, limit);
    return false;
}

// Copies one channel's window after `step` into the history of `slot`.
template <int kWhich>
__device__ __forceinline__ void roll_history(const CommitParams& params, long long layer, long long scratch,
                                             long long step, long long slot, int channel) {
    const KDA_ACTIVATION* const from = params.windows[kWhich] + layer * params.window_layer_stride[kWhich] +
                                       scratch * params.window_row_stride[kWhich] +
                                       step * params.window_step_stride[kWhich] +
                                       channel * params.window_channel_stride[kWhich];
    KDA_ACTIVATION* const to = params.cs[kWhich] + layer * params.cs_layer_stride[kWhich] +
                               slot * params.cs_slot_stride[kWhich] +
                               channel * params.cs_channel_stride[kWhich];
#pragma unroll
    for (int tap = 0; tap < 3; ++tap)
        to[tap * params.cs_tap_stride[kWhich]] = from[tap * params.window_tap_stride[kWhich]];
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    commit(const __grid_constant__ CommitParams params) {
    // Grid (HV, requests of this launch, layers).
    extern __shared__ float4 shared[];
    auto& chain = *reinterpret_cast<Chain<kTokens, 1>*>(shared);
    const long long row = params.first_request + blockIdx.y, layer = blockIdx.z;
    const int head = blockIdx.x, key_head = head / params.group;
    Move move;
    if (!plan_move(params, row, head == 0 && layer == 0 && threadIdx.x == 0, move)) return;
    const int n = static_cast<int>(move.accepted);
    const long long head_at = static_cast<long long>(head) * (kV * kK);
    float* const pool = params.recurrent_state + layer * params.state_layer_stride + head_at;
    float* const state = pool + move.slot * params.state_slot_stride;
    float* const track = pool + move.track_slot * params.state_slot_stride;

    HeadState S;
    if (params.intermediate_ssm) {
        const float* const snapshots = params.intermediate_ssm + layer * params.snapshot_layer_stride +
                                       move.scratch * params.snapshot_row_stride + head_at;
        load_state(S, snapshots + (n - 1) * params.snapshot_step_stride);
        store_state(state, S);
        if (move.track_step >= 0) {
            load_state(S, snapshots + move.track_step * params.snapshot_step_stride);
            store_state(track, S);
        }
    } else {
        load_state(S, state);
        const int channel = threadIdx.x % kK;
        const KDA_ACTIVATION* const ring =
            threadIdx.x < kK
                ? params.ring_k + layer * params.ring_k_layer_stride + move.ring * params.ring_k_slot_stride +
                      key_head * params.ring_k_head_stride
                : params.ring_v + layer * params.ring_v_layer_stride + move.ring * params.ring_v_slot_stride +
                      head * params.ring_v_head_stride;
        float (*const to)[kK] = threadIdx.x < kK ? chain.k : chain.v;
#pragma unroll
        for (int j = 0; j < kTokens; ++j) to[j][channel] = j < n ? to_float(ring[j * kK + channel]) : 0.0f;
        if (threadIdx.x < kK) {
            const float* const g = params.ring_g + layer * params.ring_g_layer_stride +
                                   move.ring * params.ring_g_slot_stride +
                                   static_cast<long long>(head) * params.ring_steps * kK + channel;
            float growth = 1.0f;
#pragma unroll
            for (int j = 0; j < kTokens; ++j) {
                const float decay = j < n ? expf(g[j * kK]) : 1.0f;
                growth *= decay;
                chain.decay[j][channel] = decay;
                chain.growth[j][channel] = growth;
            }
        } else if (channel < kTokens) {
            chain.beta[channel] =
                channel < n ? params.ring_beta[layer * params.ring_beta_layer_stride +
                                               move.ring * params.ring_beta_slot_stride +
                                               static_cast<long long>(head) * params.ring_steps + channel]
                            : 0.0f;
        }
        __syncthreads();
        normalize(chain, params.normalize_k, 1.0f);
        __syncthreads();
        coefficients(chain, n);
        multiply(chain, S);
        __syncthreads();
        float u[kTokens];
        substitute(chain, n, u);
        keep_corrections(chain, u);
#pragma unroll 1
        for (int j = 0; j < n; ++j) {
            advance(S, chain, j);
            if (j == move.track_step) store_state(track, S);
        }
        store_state(state, S);
    }

    if (params.cs[0] && threadIdx.x < kK) {
        const bool first_of_group = head % params.group == 0;
        for (int which = 0; which < 2; ++which) {
            const long long step = which == 0 ? n - 1 : move.track_step,
                            slot = which == 0 ? move.slot : move.track_slot;
            if (step < 0) continue;
            if (first_of_group) {
                roll_history<0>(params, layer, move.scratch, step, slot, key_head * kK + threadIdx.x);
                roll_history<1>(params, layer, move.scratch, step, slot, key_head * kK + threadIdx.x);
            }
            roll_history<2>(params, layer, move.scratch, step, slot, head * kV + threadIdx.x);
        }
    }
}
