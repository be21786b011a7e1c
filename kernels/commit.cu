// SPDX-License-Identifier: Apache-2.0
// Commit: n tokens of a verify become permanent. All layers in one launch.
//
// From snapshots, the state after token n - 1 is copied. From rings it is computed again: what the verify left is
// act(k), act(v), log decays and betas, from which kernels/chain.cuh gives the corrections u of eight tokens at once (one
// product with the state as it was), and the state after them is one more product,
//
//   S <- S D_0n + U K~^T,     K~_i = k_i D_in
//
// on tensor cores like the first: u leaves the substitution as the A operand of it. The sums of both ways are the same,
// their order is not, so that they agree to 2e-6 and not to the bit.
//
// One block is one value head of one request of one layer: 8 warps, 16 value rows each, the state in registers.
// Bytes a head: 64 KiB read, 64 KiB written, 1 KiB a token; the floor is the yardstick RW.
//
// n = 0 leaves everything as it is. So does a count, slot, row or step out of range, which is recorded; a slot
// <= null_index is padding. The conv history becomes the window after token n - 1. A tracking slot receives what state and
// history are after step s: the chain is then cut behind that step.

#include "memory.cuh"
#include "warp.cuh"
#include "guard.cuh"
#include "tf32.cuh"
#include "chain.cuh"
#include "quads.cuh"

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
    int normalize_k, operation;
};

namespace {

using Activation = KDA_ACTIVATION;
constexpr bool kVector = KDA_VECTOR;

// K~ for the product that advances the state: tf32 head and rest of a number side by side, and rows begun so that the
// lanes of a half warp, which read four rows at eight keys, meet in no bank.
constexpr int kKeptStride = kK + 16;
__device__ __forceinline__ int kept_at(int token, int key) {
    return token * kKeptStride + token % 2 * 2 + token / 2 % 2 * 8 + key;
}

struct Shared {
    Chain chain;
    float2 kept[kChunk * kKeptStride];
    int steep[kWarps / 2];  // first token with a steep decay, a part of the keys each
};

static_assert(sizeof(CommitParams) == KDA_PARAMS_BYTES, "host and device disagree about the parameters");
static_assert(sizeof(Shared) == KDA_SHARED_BYTES, "host and device disagree about shared memory");

// What one request asks for. Its numbers have been found to be in range, and no array has 2^31 slots or rows of a KiB:
// offsets made of them are 64-bit because strides are.
struct Move {
    int slot, scratch, ring, accepted, track_slot, track_step;  // track_step < 0: no tracking
};

// False if there is nothing to do; the first fault of a request is noted once. Operand numbers: OPERANDS in mtp_params.py.
__device__ __forceinline__ bool plan_move(const CommitParams& params, long long row, bool speaks,
                                          Move& move) {
    const bool has_scratch = params.intermediate_ssm || params.cs[0];
    const long long slot = load_index(params.ssm_state_indices, params.slot_index_is_64bit,
                                      row * params.slot_index_stride),
                    accepted =
                        load_index(params.accept_lens, params.accept_is_64bit, row * params.accept_stride);
    long long scratch = 0, ring = slot, track_slot = 0, track_step = -1;
    if (has_scratch)
        scratch = load_index(params.intermediate_state_indices, params.scratch_index_is_64bit,
                             row * params.scratch_index_stride);
    if (params.ring_v && params.ring_indices)
        ring = load_index(params.ring_indices, params.ring_index_is_64bit, row * params.ring_index_stride);
    if (params.track_indices) {
        track_slot =
            load_index(params.track_indices, params.track_index_is_64bit, row * params.track_index_stride);
        track_step =
            load_index(params.track_steps, params.track_step_is_64bit, row * params.track_step_stride);
    }
    if (slot <= params.null_index) return false;
    if (track_slot <= params.null_index || track_step < 0) track_step = -1;
    int operand = -1;
    long long value = 0, limit = 0;
    if (slot >= params.slots)
        operand = 0, value = slot, limit = params.slots;
    else if (accepted < 0 || accepted > params.max_tokens)
        operand = 4, value = accepted, limit = params.max_tokens;
    else if (accepted == 0)
        return false;
    else if (has_scratch && (scratch < 0 || scratch >= params.scratch_rows))
        operand = 2, value = scratch, limit = params.scratch_rows;
    else if (params.ring_v && (ring < 0 || ring >= params.ring_rows))
        operand = 3, value = ring, limit = params.ring_rows;
    else if (track_step >= 0 && track_slot >= params.slots)
        operand = 5, value = track_slot, limit = params.slots;
    else if (track_step >= accepted)
        operand = 6, value = track_step, limit = accepted;
    if (operand >= 0) {
        if (speaks) record_error(params.errors, params.operation, operand, row, value, limit);
        return false;
    }
    move = {int(slot), int(scratch), int(ring), int(accepted), int(track_slot), int(track_step)};
    return true;
}

// One channel's conv history of q, k and v: the window after `step` goes to `slot`. q and k by the first value head of
// their group only.
__device__ __forceinline__ void roll_history(const CommitParams& params, int layer, int scratch, int step,
                                             int slot, int head, int channel) {
    Activation history[3][3];
    const int key_head = head / params.group;
#pragma unroll
    for (int which = 0; which < 3; ++which) {
        const Activation* const from =
            params.windows[which] + layer * params.window_layer_stride[which] +
            scratch * params.window_row_stride[which] + step * params.window_step_stride[which] +
            ((which == 2 ? head : key_head) * kK + channel) * params.window_channel_stride[which];
#pragma unroll
        for (int tap = 0; tap < 3; ++tap) history[which][tap] = from[tap * params.window_tap_stride[which]];
    }
#pragma unroll
    for (int which = 0; which < 3; ++which) {
        if (which < 2 && head % params.group != 0) continue;
        Activation* const to =
            params.cs[which] + layer * params.cs_layer_stride[which] + slot * params.cs_slot_stride[which] +
            ((which == 2 ? head : key_head) * kK + channel) * params.cs_channel_stride[which];
#pragma unroll
        for (int tap = 0; tap < 3; ++tap) to[tap * params.cs_tap_stride[which]] = history[which][tap];
    }
}

// What a thread takes from the rings: log decays of one key (half the warps), four channels of k and v of the token of its
// warp, one beta.
struct Raw {
    float g[kChunk], beta;
    Quad<Activation> k, v;
};

__device__ __forceinline__ Raw load_rings(const CommitParams& params, int layer, int ring, int head,
                                          int first, int tokens) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const long long first_step = static_cast<long long>(head) * params.ring_steps + first;
    Raw raw = {};
    if (warp < kWarps / 2) {
        const float* const g = params.ring_g + layer * params.ring_g_layer_stride +
                               ring * params.ring_g_slot_stride + first_step * kK + threadIdx.x;
#pragma unroll
        for (int j = 0; j < kChunk; ++j)
            if (j < tokens) raw.g[j] = g[j * kK];
    }
    if (threadIdx.x < tokens)
        raw.beta = params.ring_beta[layer * params.ring_beta_layer_stride +
                                    ring * params.ring_beta_slot_stride + first_step + threadIdx.x];
    if (warp < tokens) {
        const int at = (first + warp) * kK + 4 * lane;
        raw.k = load_quad<kVector>(params.ring_k + layer * params.ring_k_layer_stride +
                                   ring * params.ring_k_slot_stride +
                                   head / params.group * params.ring_k_head_stride + at);
        raw.v = load_quad<kVector>(params.ring_v + layer * params.ring_v_layer_stride +
                                   ring * params.ring_v_slot_stride + head * params.ring_v_head_stride + at);
    }
    return raw;
}

// Decays and running products of one key. Returns the first token whose product is steep.
__device__ __forceinline__ int decay(const Raw& raw, int tokens, int key, Chain& chain) {
    float decay[kChunk], growth = 1.0f;
    int steep = kChunk;
#pragma unroll
    for (int j = 0; j < kChunk; ++j) decay[j] = expf(raw.g[j]);
#pragma unroll
    for (int j = 0; j < kChunk; ++j)
        if (j < tokens) {
            growth *= decay[j];
            if (steep == kChunk && !(growth >= kSteep)) steep = j;
            chain.decay[j][key] = decay[j];
            chain.growth[j][key] = growth;
        }
    return steep;
}

// K~ of token i = warp; zero past the last token, since the product takes all eight.
__device__ __forceinline__ void keep(Shared& shared, float4 x) {
    const float4 head = tf32_head(x);
    float2* const to = &shared.kept[kept_at(threadIdx.x / 32, 4 * (threadIdx.x % 32))];
    store_shared(&to[0].x, make_float4(head.x, x.x - head.x, head.y, x.y - head.y));
    store_shared(&to[2].x, make_float4(head.z, x.z - head.z, head.w, x.w - head.w));
}

// S <- S D_0n + U K~^T
__device__ __forceinline__ void fold(HeadState& S, const Shared& shared, int tokens, const LaneRows& u) {
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    const float2 first = of_rows(u, q), second = of_rows(u, q + 4);
    const float4 a = make_float4(q < tokens ? first.x : 0.0f, q < tokens ? first.y : 0.0f,
                                 q + 4 < tokens ? second.x : 0.0f, q + 4 < tokens ? second.y : 0.0f);
    const float4 a_head = tf32_head(a), a_rest = a - a_head;
#pragma unroll
    for (int c = 0; c < 8; ++c) {
        const float4 growth = load_shared(&shared.chain.growth[tokens - 1][16 * c + 4 * q]);
        float added[2][4];
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            const int key = 16 * c + 4 * (g / 2) + 2 * s + g % 2;  // column g of the product's eight
            const float2 b0 = shared.kept[kept_at(q, key)], b1 = shared.kept[kept_at(q + 4, key)];
            float large[4] = {}, small[4] = {};
            multiply_add(small, a_head, {b0.y, b1.y});
            multiply_add(small, a_rest, {b0.x, b1.x});
            multiply_add(large, a_head, {b0.x, b1.x});
#pragma unroll
            for (int i = 0; i < 4; ++i) added[s][i] = large[i] + small[i];
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float4& x = S.rows[half][c];
            x.x = fmaf(x.x, growth.x, added[0][2 * half]);
            x.y = fmaf(x.y, growth.y, added[0][2 * half + 1]);
            x.z = fmaf(x.z, growth.z, added[1][2 * half]);
            x.w = fmaf(x.w, growth.w, added[1][2 * half + 1]);
        }
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, kVector ? kBlocks : 1)
    commit(const __grid_constant__ CommitParams params) {
    // Grid (HV, requests of this launch, layers).
    extern __shared__ float4 memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    Chain& chain = shared.chain;
    const long long row = params.first_request + blockIdx.y;
    const int layer = blockIdx.z;
    const int head = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, channel = threadIdx.x % kK;
    Move move;
    if (!plan_move(params, row, head == 0 && layer == 0 && threadIdx.x == 0, move)) return;
    const int n = move.accepted;
    // Where this head begins in a slot of the pool. Addresses are worked out where they are used: kept over the products,
    // which need all registers, they would spill.
    auto head_of_slot = [&](int slot) {
        return params.recurrent_state + layer * params.state_layer_stride +
               static_cast<long long>(opaque(slot)) * params.state_slot_stride +
               static_cast<long long>(head) * (kV * kK);
    };
    const bool rolls = params.cs[0] && warp >= kWarps / 2;
    HeadState S;
    if (params.intermediate_ssm) {
        const float* const snapshots = params.intermediate_ssm + layer * params.snapshot_layer_stride +
                                       move.scratch * params.snapshot_row_stride +
                                       static_cast<long long>(head) * (kV * kK);
        load_state(S, snapshots + (n - 1) * params.snapshot_step_stride);
        if (rolls) roll_history(params, layer, move.scratch, n - 1, move.slot, head, channel);
        store_state(head_of_slot(move.slot), S);
        if (move.track_step >= 0) {
            load_state(S, snapshots + move.track_step * params.snapshot_step_stride);
            store_state(head_of_slot(move.track_slot), S);
        }
    } else {
        int end;
#pragma unroll 1
        for (int first = 0; first < n; first = end) {
            end = min(first + kChunk, n);
            if (move.track_step >= first && move.track_step < end) end = move.track_step + 1;
            const int tokens = end - first;
            if (first > 0) __syncthreads();  // the chunk before may still be read
            Raw raw = load_rings(params, layer, opaque(move.ring), head, first, tokens);
            if (first == 0) {
                load_state(S, head_of_slot(move.slot));
                if (rolls) roll_history(params, layer, move.scratch, n - 1, move.slot, head, channel);
            }
            if (warp < kWarps / 2) {
                const int steep = min_lanes(decay(raw, tokens, channel, chain));
                if (lane == 0) shared.steep[warp] = steep;
            }
            if (threadIdx.x < tokens) chain.beta[threadIdx.x] = raw.beta;
            store_shared(&chain.v[warp][4 * lane], to_float4(raw.v));
            __syncthreads();
            float4 kept = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (warp < tokens) {
                const float4 k = params.normalize_k ? unit(to_float4(raw.k)) : to_float4(raw.k);
                kept = place(chain, warp, k, kept) * load_shared(&chain.growth[tokens - 1][4 * lane]);
            }
            keep(shared, kept);
            __syncthreads();
            const int steep =
                min(min(shared.steep[0], shared.steep[1]), min(shared.steep[2], shared.steep[3]));
            multiply_coefficients(chain, steep);
            if (steep < tokens) keep(shared, sum_coefficients(chain, steep, tokens));
            LaneRows u, unused;
            project(chain, S, u, unused);
            __syncthreads();
            substitute<false>(chain, tokens, u, unused);
            fold(S, shared, tokens, u);
            if (end == move.track_step + 1) store_state(head_of_slot(move.track_slot), S);
        }
        store_state(head_of_slot(move.slot), S);
    }
    if (rolls && move.track_step >= 0)
        roll_history(params, layer, move.scratch, move.track_step, move.track_slot, head, channel);
}
