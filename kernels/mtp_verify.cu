// SPDX-License-Identifier: Apache-2.0
// Verify of 1 + num_spec draft tokens of KDA: conv, gates, norms, the delta rule over all tokens of a request, and what a
// rollback needs, in one launch. The persistent state and conv history are read and never written.
//
// One block is one value head of one request: 8 warps, 16 value rows each. Eight tokens at a time, the state in registers:
//
//   1  warps 4 to 7 start copies of the raw inputs, histories before them, into shared memory; warps 0 to 3 ask for the gates,
//      a key a thread; then all ask for the state (64 KiB a block, on its way while this step and the next run), and warps 0
//      to 3 work out decays and their running products
//   2  conv, SiLU and norms of q, k and v, and the operands: a token a warp, a lane four channels
//   3  S0 times the operand on tensor cores (kernels/tf32.cuh), and the coefficients A and B by four of the warps
//   4  a triangular substitution a value row, by shuffles; outputs
//
// with a barrier between them; the algebra stands in kernels/chain.cuh. Snapshots walk the state through the tokens in
// the same registers and store it after each; rings store what a commit needs to walk it later: 1,028 bytes a token
// instead of 65,536. Outputs come from the same instructions in both modes, so their bits are equal.
//
// Bytes at 8 tokens, a head: 64 KiB of state, 1 KiB a token of inputs, 1 KiB of rings, 2.3 KiB of conv windows, 256 of
// out. Windows of neighbouring tokens share two of their three inputs: scratch whose step and tap strides are the same
// (a sliding view over raw inputs) holds each input once, and then a third of those bytes is written.
//
// Why one block a head: blocks that stay and take heads in turn, with the next head's inputs and state on their way, were
// no faster on an H200 (310 us against 296 at 8,192 heads and eight tokens) and slower at one request (8.8 us against 7.7);
// neither were three blocks an SM whose state waits in L2 (306 us).
//
// A slot <= null_index, or anything out of range (then recorded): nothing is touched but this request's own rows of
// `out`, which are zero. A request of length 0 does nothing. Rows of `out` past the last request are zeroed by all blocks together.

#include "memory.cuh"
#include "warp.cuh"
#include "gates.cuh"
#include "guard.cuh"
#include "tf32.cuh"
#include "chain.cuh"
#include "conv.cuh"
#include "pairs.cuh"
#include "quads.cuh"

// Mirrors VerifyPointers and VerifyLayout in kda_cupy/ops/mtp_params.py, field by field; arrays of three are q, k, v.
struct MtpVerifyParams {
    const KDA_ACTIVATION* x[3];
    const KDA_CONV_WEIGHT* w[3];
    const KDA_CONV_WEIGHT* conv_bias[3];
    const KDA_ACTIVATION* cs[3];
    KDA_ACTIVATION* windows[3];
    const KDA_G* g;
    const KDA_BETA* beta;
    const KDA_A_LOG* A_log;
    const KDA_DT_BIAS* dt_bias;
    const float* recurrent_state;
    float* intermediate_ssm;
    const void* ssm_state_indices;
    const void* intermediate_state_indices;
    const void* ring_indices;
    const void* cu_seqlens;
    KDA_ACTIVATION* ring_v;
    KDA_ACTIVATION* ring_k;
    float* ring_g;
    float* ring_beta;
    const KDA_ACTIVATION* onorm_gate;
    const KDA_ONORM_WEIGHT* onorm_weight;
    KDA_ACTIVATION* out;
    ErrorRecord* errors;
    long long first_request;
    long long x_stride[3], w_stride[3], cs_slot_stride[3], cs_channel_stride[3], cs_tap_stride[3];
    long long window_row_stride[3], window_step_stride[3], window_channel_stride[3], window_tap_stride[3];
    long long g_stride, beta_stride, beta_head_stride, state_slot_stride, snapshot_row_stride,
        snapshot_step_stride;
    long long ring_v_slot_stride, ring_v_head_stride, ring_k_slot_stride, ring_k_head_stride,
        ring_g_slot_stride, ring_beta_slot_stride;
    long long onorm_gate_stride, out_stride, slot_index_stride, scratch_index_stride, ring_index_stride;
    long long requests, tokens, slots, scratch_rows, ring_rows;
    int max_tokens, ring_steps, null_index;
    int slot_index_is_64bit, scratch_index_is_64bit, ring_index_is_64bit, cu_seqlens_is_64bit;
    int normalize_qk, group, operation;  // group: value heads to a q/k head
    float scale, lower_bound, beta_scale, onorm_eps;
};

namespace {

constexpr bool kBounded = KDA_BOUNDED, kVector = KDA_VECTOR;
constexpr int kTaps = 4, kRows = kTaps - 1 + kChunk;  // raw inputs of a chunk: those before it, then its own

using Activation = KDA_ACTIVATION;
using Channels = Quad<Activation>;

enum { kQ, kK_, kV_ };

struct alignas(16) Shared {
    Chain chain;
    float taps[3][kTaps][kK], bias[3][kK];
    Channels raw[3][kRows][kK / 4];
    Activation *windows[3],
        *rings[3];  // where this head and request begin in them; null where this block does not write
    float squares[kWarps][kChunk];
    int steep[kWarps / 2];  // first token with a steep decay, a part of the keys each
};

static_assert(sizeof(MtpVerifyParams) == KDA_PARAMS_BYTES, "host and device disagree about the parameters");
static_assert(sizeof(Shared) == KDA_SHARED_BYTES, "host and device disagree about shared memory");

// Its numbers have been found to be in range, and no array has 2^31 slots, rows or tokens of a KiB: offsets made of them
// are 64-bit because strides are.
struct Request {
    int slot, scratch, ring, first_token, tokens, head, key_head;
    bool first_of_group;
};

// Eight tokens (or what is left) from `first` on.
struct Chunk {
    int first, tokens;
};

__device__ __forceinline__ int head_of(const Request& request, int which) {
    return which == kV_ ? request.head : request.key_head;
}

// An offset of n steps. What can be moved four at a time has no stride of 2^31 elements (the host sees to it), and then
// one instruction multiplies.
__device__ __forceinline__ long long steps(int n, long long stride) {
    return kVector ? static_cast<long long>(n) * static_cast<int>(stride) : n * stride;
}

// Taps and biases of a channel a thread.
struct Taps {
    float w[3][kTaps], bias[3];
};

__device__ __forceinline__ Taps load_taps(const MtpVerifyParams& params, int head, int key_head,
                                          int channel) {
    Taps taps;
#pragma unroll
    for (int which = 0; which < 3; ++which) {
        const int wide_channel = (which == kV_ ? head : key_head) * kK + channel;
        const KDA_CONV_WEIGHT* const w = params.w[which] + wide_channel * params.w_stride[which];
#pragma unroll
        for (int tap = 0; tap < kTaps; ++tap) taps.w[which][tap] = to_float(w[tap]);
        taps.bias[which] = params.conv_bias[which] ? to_float(params.conv_bias[which][wide_channel]) : 0.0f;
    }
    return taps;
}

__device__ __forceinline__ void stage_taps(const Taps& taps, int channel, Shared& shared) {
#pragma unroll
    for (int which = 0; which < 3; ++which) {
#pragma unroll
        for (int tap = 0; tap < kTaps; ++tap) shared.taps[which][tap][channel] = taps.w[which][tap];
        shared.bias[which][channel] = taps.bias[which];
    }
}

// Raw inputs of a chunk and the three before it, a row a warp: from x, or from the history where the request begins.
__device__ __forceinline__ void stage_inputs(const MtpVerifyParams& params, const Request& request,
                                             Chunk chunk, int warp, int warps, Shared& shared) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int which = 0; which < 3; ++which) {
        const int channel = head_of(request, which) * kK + 4 * lane;
        const long long channel_stride = kVector ? 1 : params.cs_channel_stride[which];
        const Activation* const x = params.x[which] + request.first_token * params.x_stride[which] + channel;
        const Activation* const history =
            params.cs[which] + request.slot * params.cs_slot_stride[which] + channel * channel_stride;
#pragma unroll 1
        for (int row = warp; row < kTaps - 1 + chunk.tokens; row += warps) {
            const int token = chunk.first + row - (kTaps - 1);
            const bool inside = token >= 0;
            const Activation* const from =
                inside ? x + steps(token, params.x_stride[which])
                       : history + steps(kTaps - 1 + token, params.cs_tap_stride[which]);
            copy_quad<kVector>(&shared.raw[which][row][lane], from, inside ? 1 : channel_stride);
        }
    }
}

// Raw gates of one key.
struct Gates {
    KDA_G of[kChunk];
};

__device__ __forceinline__ Gates load_gates(const MtpVerifyParams& params, const Request& request,
                                            Chunk chunk, int key) {
    const KDA_G* const raw =
        params.g + (request.first_token + chunk.first) * params.g_stride + request.head * kK + key;
    Gates gates = {};
#pragma unroll
    for (int j = 0; j < kChunk; ++j)
        if (j < chunk.tokens) gates.of[j] = raw[steps(j, params.g_stride)];
    return gates;
}

// Their decays and running products. Returns the first token whose product is steep.
__device__ __forceinline__ int decay(const MtpVerifyParams& params, const Request& request, Chunk chunk,
                                     int key, float bias, float rate, const Gates& gates, Chain& chain) {
    float* const ring =
        params.ring_g
            ? params.ring_g + request.ring * params.ring_g_slot_stride +
                  (static_cast<long long>(request.head) * params.ring_steps + chunk.first) * kK + key
            : nullptr;
    const int kept = ring ? min(chunk.tokens, params.ring_steps - chunk.first) : 0;
    float growth = 1.0f;
    int steep = kChunk;
#pragma unroll
    for (int first = 0; first < kChunk; first += 4) {  // four at a time hide one another's latency
        float log[4];
#pragma unroll
        for (int n = 0; n < 4; ++n)
            log[n] = log_decay<kBounded>(to_float(gates.of[first + n]) + bias, rate, params.lower_bound);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const int j = first + n;
            if (j < kept) ring[j * kK] = log[n];
            const float decay = expf(log[n]);
            if (j < chunk.tokens) {
                growth *= decay;
                if (steep == kChunk && !(growth >= kSteep)) steep = j;
                chain.decay[j][key] = decay;
                chain.growth[j][key] = growth;
            }
        }
    }
    return steep;
}

__device__ __forceinline__ void keep_beta(const MtpVerifyParams& params, const Request& request, int step,
                                          int j, float raw, Chain& chain) {
    const float beta = params.beta_scale * sigmoid(raw);
    chain.beta[j] = beta;
    if (params.ring_beta && step < params.ring_steps)
        params.ring_beta[request.ring * params.ring_beta_slot_stride +
                         static_cast<long long>(request.head) * params.ring_steps + step] = beta;
}

__device__ __forceinline__ void stage_targets(const MtpVerifyParams& params, const Request& request,
                                              int which, Shared& shared) {
    const bool writes = which == kV_ || request.first_of_group;
    shared.windows[which] = writes && params.windows[which]
                                ? params.windows[which] + request.scratch * params.window_row_stride[which] +
                                      head_of(request, which) * kK * params.window_channel_stride[which]
                                : nullptr;
    shared.rings[which] = !writes || which == kQ || !params.ring_v ? nullptr
                          : which == kV_ ? params.ring_v + request.ring * params.ring_v_slot_stride +
                                               request.head * params.ring_v_head_stride
                                         : params.ring_k + request.ring * params.ring_k_slot_stride +
                                               request.key_head * params.ring_k_head_stride;
}

// Conv and SiLU of q, k or v of one token, its window and its ring. A warp, four channels a lane.
template <int kWhich>
__device__ __forceinline__ float4 activate(const MtpVerifyParams& params, int step, int j,
                                           const Shared& shared) {
    const int lane = threadIdx.x % 32, channel = 4 * lane;
    Channels raw[kTaps];
    float4 x[kTaps], w[kTaps];
#pragma unroll
    for (int tap = 0; tap < kTaps; ++tap) {
        raw[tap] = shared.raw[kWhich][j + tap][lane];
        x[tap] = to_float4(raw[tap]);
        w[tap] = load_shared(&shared.taps[kWhich][tap][channel]);
    }
    const float4 bias = load_shared(&shared.bias[kWhich][channel]);
    const Channels rounded = from_float4<Activation>(
        make_float4(conv_silu({w[0].x, w[1].x, w[2].x, w[3].x}, bias.x, x[0].x, x[1].x, x[2].x, x[3].x),
                    conv_silu({w[0].y, w[1].y, w[2].y, w[3].y}, bias.y, x[0].y, x[1].y, x[2].y, x[3].y),
                    conv_silu({w[0].z, w[1].z, w[2].z, w[3].z}, bias.z, x[0].z, x[1].z, x[2].z, x[3].z),
                    conv_silu({w[0].w, w[1].w, w[2].w, w[3].w}, bias.w, x[0].w, x[1].w, x[2].w, x[3].w)));
    if (Activation* window = shared.windows[kWhich]) {
        const long long channel_stride = kVector ? 1 : params.window_channel_stride[kWhich],
                        tap_stride = params.window_tap_stride[kWhich],
                        step_stride = params.window_step_stride[kWhich];
        window += steps(step, step_stride) + channel * channel_stride;
        if (step == 0 || step_stride != tap_stride) {
            store_quad<kVector>(window, raw[1], channel_stride);
            store_quad<kVector>(window + tap_stride, raw[2], channel_stride);
        }
        store_quad<kVector>(window + 2 * tap_stride, raw[3], channel_stride);
    }
    if constexpr (kWhich != kQ) {
        Activation* const ring = shared.rings[kWhich];
        if (ring && step < params.ring_steps) store_quad<kVector>(ring + step * kK + channel, rounded);
    }
    return to_float4(rounded);
}

// All vectors of the chunk: a warp a token; with four tokens or fewer, half the warps take q and k and half take v.
__device__ __forceinline__ void prepare(const MtpVerifyParams& params, Chunk chunk, int warp,
                                        Shared& shared) {
    const bool halves = chunk.tokens <= kWarps / 2;
    const int j = halves ? warp % (kWarps / 2) : warp, step = chunk.first + j;
    if (j >= chunk.tokens) return;
    if (!halves || warp == j) {
        float4 q = activate<kQ>(params, step, j, shared), k = activate<kK_>(params, step, j, shared);
        if (params.normalize_qk) q = unit(q), k = unit(k);
        place(shared.chain, j, k, q * params.scale);
    }
    if (!halves || warp != j)
        store_shared(&shared.chain.v[j][4 * (threadIdx.x % 32)], activate<kV_>(params, step, j, shared));
}

// o * rsqrt(mean over the head of o^2 + eps) * weight * sigmoid(gate)
__device__ __forceinline__ void normalize_output(const MtpVerifyParams& params, const Activation* gate,
                                                 bool live, int row, Shared& shared, LaneRows& o) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4;
    float square = fmaf(o.of[0][0], o.of[0][0], o.of[0][1] * o.of[0][1]) +
                   fmaf(o.of[1][0], o.of[1][0], o.of[1][1] * o.of[1][1]);
    square = sum_lanes<4>(square);
    shared.squares[warp][g] = square;
    __syncthreads();
    if (!live) return;
    float squares = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) squares += shared.squares[w][g];
    const float norm = rsqrtf(squares * (1.0f / kV) + params.onorm_eps);
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int n = 0; n < 2; ++n)
            o.of[half][n] *= norm * to_float(params.onorm_weight[row + 8 * half + n]) *
                             sigmoid(to_float(gate[8 * half + n]));
}

__device__ __forceinline__ void zero_rows(const MtpVerifyParams& params, int head, long long first,
                                          long long end, long long step) {
    for (long long token = first; token < end; token += step)
        if (threadIdx.x < kV)
            params.out[token * params.out_stride + head * kV + threadIdx.x] =
                from_float<KDA_ACTIVATION>(0.0f);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, kVector && sizeof(Activation) == 2 ? kBlocks : 1)
    mtp_verify(const __grid_constant__ MtpVerifyParams params) {
    // Grid (HV, requests of this launch).
    extern __shared__ float4 memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    Chain& chain = shared.chain;

    const int warp = threadIdx.x / 32, key = threadIdx.x % kK;
    const bool gates = warp < kWarps / 2;  // the other warps bring the inputs of the conv

    Request request;
    request.head = blockIdx.x;
    request.key_head = request.head / params.group;
    request.first_of_group = request.head % params.group == 0;
    const long long row = params.first_request + blockIdx.y;
    const bool has_scratch = params.intermediate_ssm || params.windows[0];
    const long long slot =
        load_index(params.ssm_state_indices, params.slot_index_is_64bit, row * params.slot_index_stride);
    const long long begin = load_index(params.cu_seqlens, params.cu_seqlens_is_64bit, row),
                    end = load_index(params.cu_seqlens, params.cu_seqlens_is_64bit, row + 1),
                    all = load_index(params.cu_seqlens, params.cu_seqlens_is_64bit, params.requests);
    const long long scratch =
        has_scratch ? load_index(params.intermediate_state_indices, params.scratch_index_is_64bit,
                                 row * params.scratch_index_stride)
                    : 0;
    const long long ring =
        params.ring_v && params.ring_indices
            ? load_index(params.ring_indices, params.ring_index_is_64bit, row * params.ring_index_stride)
            : slot;

    // What needs no index, in the shadow of theirs.
    Taps taps;
    float gate_bias, gate_rate;
    if (gates) {
        gate_bias = to_float(params.dt_bias[request.head * kK + key]);
        gate_rate = params.A_log ? to_float(params.A_log[request.head]) : 0.0f;
    } else {
        taps = load_taps(params, request.head, request.key_head, key);
    }

    zero_rows(params, request.head, (all < 0 ? 0 : all) + row, params.tokens, params.requests);
    const long long length = end - begin;
    const bool padding = slot <= params.null_index,
               bad_length = length < 0 || length > params.max_tokens || begin < 0 || end > params.tokens,
               bad_slot = slot >= params.slots,
               bad_scratch = has_scratch && (scratch < 0 || scratch >= params.scratch_rows),
               bad_ring = params.ring_v && (ring < 0 || ring >= params.ring_rows);
    if (padding || bad_length || length == 0 || bad_slot || bad_scratch || bad_ring) {
        if (!padding && !bad_length && length == 0) return;
        // The first fault of a request is noted once, by its first head; numbers are those of OPERANDS in mtp_params.py.
        if (!padding && request.head == 0 && threadIdx.x == 0)
            record_error(params.errors, params.operation,
                         bad_length    ? 1
                         : bad_slot    ? 0
                         : bad_scratch ? 2
                                       : 3,
                         row,
                         bad_length    ? length
                         : bad_slot    ? slot
                         : bad_scratch ? scratch
                                       : ring,
                         bad_length    ? params.max_tokens
                         : bad_slot    ? params.slots
                         : bad_scratch ? params.scratch_rows
                                       : params.ring_rows);
        zero_rows(params, request.head, begin < 0 ? 0 : begin, end < params.tokens ? end : params.tokens, 1);
        return;
    }
    request.slot = static_cast<int>(slot);
    request.scratch = static_cast<int>(scratch);
    request.ring = static_cast<int>(ring);
    request.first_token = static_cast<int>(begin);
    request.tokens = static_cast<int>(length);

    if (gates)
        gate_rate = decay_rate(gate_rate);
    else
        stage_taps(taps, key, shared);
    HeadState S;
#pragma unroll 1
    for (Chunk chunk = {0, 0}; chunk.first < request.tokens; chunk.first += kChunk) {
        chunk.tokens = min(request.tokens - chunk.first, kChunk);
        if (chunk.first > 0) __syncthreads();  // the chunk before may still be read
        Gates raw;
        KDA_BETA raw_beta;
        if (gates) {
            raw = load_gates(params, request, chunk, key);
        } else {
            stage_inputs(params, request, chunk, warp - kWarps / 2, kWarps / 2, shared);
            if (key < chunk.tokens)
                raw_beta = params.beta[(request.first_token + chunk.first + key) * params.beta_stride +
                                       request.head * params.beta_head_stride];
        }
        if (chunk.first == 0)
            load_state(S, params.recurrent_state + request.slot * params.state_slot_stride +
                              static_cast<long long>(request.head) * (kV * kK));
        if (gates) {
            const int steep = min_lanes(decay(params, request, chunk, key, gate_bias, gate_rate, raw, chain));
            if (threadIdx.x % 32 == 0) shared.steep[warp] = steep;
        } else if (key < chunk.tokens) {
            keep_beta(params, request, chunk.first + key, key, to_float(raw_beta), chain);
        }
        if (chunk.first == 0 && warp == kWarps - 1 && key % 32 < 3)
            stage_targets(params, request, key % 32, shared);
        wait_for_copies();
        __syncthreads();
        prepare(params, chunk, warp, shared);
        __syncthreads();
        const int steep = min(min(shared.steep[0], shared.steep[1]), min(shared.steep[2], shared.steep[3]));
        multiply_coefficients(chain, steep);
        if (steep < chunk.tokens) sum_coefficients(chain, steep, chunk.tokens);
        LaneRows u, o;
        project(chain, S, u, o);
        __syncthreads();
        substitute<true>(chain, chunk.tokens, u, o);

        const int token = threadIdx.x % 32 / 4, row = 16 * warp + 2 * (threadIdx.x % 4);
        const bool live = token < chunk.tokens;
        const long long at = request.first_token + chunk.first + token;
        const int column = request.head * kV + row;
        if (params.onorm_gate)
            normalize_output(params, params.onorm_gate + at * params.onorm_gate_stride + column, live, row,
                             shared, o);
        if (live) {
            Activation* const out = params.out + at * params.out_stride + column;
            store_pair<kVector>(out, from_float2<Activation>(make_float2(o.of[0][0], o.of[0][1])));
            store_pair<kVector>(out + 8, from_float2<Activation>(make_float2(o.of[1][0], o.of[1][1])));
        }
        if (params.intermediate_ssm || chunk.first + kChunk < request.tokens) {
            float* snapshot = params.intermediate_ssm +
                              static_cast<long long>(opaque(request.scratch)) * params.snapshot_row_stride +
                              chunk.first * params.snapshot_step_stride +
                              static_cast<long long>(request.head) * (kV * kK);
#pragma unroll 1
            for (int j = 0; j < chunk.tokens; ++j) {
                advance(S, chain, u, j);
                if (!params.intermediate_ssm) continue;
                store_state(snapshot, S);
                snapshot += params.snapshot_step_stride;
            }
        }
    }
}
