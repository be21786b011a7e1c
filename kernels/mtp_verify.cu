// SPDX-License-Identifier: Apache-2.0
// Verify of 1 + num_spec draft tokens of KDA: conv, gates, norms, the delta rule over all tokens of a request, and what a
// rollback needs, in one launch. The persistent state and conv history are read and never written.
//
// One block is one value head of one request: 8 warps, 16 value rows each. The state is loaded into registers first
// (64 KiB a block, all of it in flight); while it is on its way the block prepares the tokens in shared memory:
//
//   1  conv and SiLU of q, k, v, two channels a thread, all tokens; gates and their running products, two keys a thread:
//      two warps for each of the four
//   2  norms, and the operand: keys and queries decayed since the first token
//   3  the coefficients A and B, a column a warp
//   4  S0 times the operand on tensor cores (kernels/tf32.cuh), a triangular substitution a value row, outputs
//
// with a barrier between them; the algebra stands in kernels/chain.cuh. Snapshots walk the state through the tokens in
// the same registers and store it after each; rings store what a commit needs to walk it later: 1,028 bytes a token
// instead of 65,536. Outputs come from the same instructions in both modes, so their bits are equal.
//
// Bytes at 8 tokens, a head: 64 KiB of state, 1 KiB a token of inputs, 1 KiB of rings, 2.3 KiB of conv windows, 256 of out.
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
    int normalize_qk, split_log2, operation;
    float scale, lower_bound, beta_scale, onorm_eps;
};

namespace {

constexpr int kTokens = KDA_TOKENS;  // room for tokens: 8 or 16
constexpr bool kBounded = KDA_BOUNDED, kVector = KDA_VECTOR;

static_assert(sizeof(MtpVerifyParams) == KDA_PARAMS_BYTES, "host and device disagree about the parameters");
static_assert(sizeof(Chain<kTokens, 2>) == KDA_SHARED_BYTES, "host and device disagree about shared memory");

enum { kQ, kK_, kV_ };

struct Request {
    long long slot, scratch, ring, first_token, row;
    int tokens, head, key_head;
    bool first_of_group;
};

// Conv and SiLU of two channels of q, k or v (`which` is the same for a whole warp: one piece of code serves the
// three), a token after the other; raw windows and rings as they come by.
__device__ __forceinline__ void activate(const MtpVerifyParams& params, const Request& request, int which,
                                         float (*to)[kK]) {
    using Channels = Pair<KDA_ACTIVATION>;
    const int channel = 2 * (threadIdx.x % 64);
    const int head = which == kV_ ? request.head : request.key_head;
    const int wide_channel = head * kK + channel;
    const bool writes = which == kV_ || request.first_of_group;

    const KDA_ACTIVATION* x = params.x[which] + request.first_token * params.x_stride[which] + wide_channel;
    Channels raw[kTokens];
#pragma unroll
    for (int j = 0; j < kTokens; ++j) {
        if (j < request.tokens) raw[j] = load_pair<kVector>(x);
        x += params.x_stride[which];
    }
    const long long cs_channel = params.cs_channel_stride[which], cs_tap = params.cs_tap_stride[which];
    const KDA_ACTIVATION* const history =
        params.cs[which] + request.slot * params.cs_slot_stride[which] + wide_channel * cs_channel;
    Channels h0 = load_pair<kVector>(history, cs_channel),
             h1 = load_pair<kVector>(history + cs_tap, cs_channel),
             h2 = load_pair<kVector>(history + 2 * cs_tap, cs_channel);
    float w[2][4], bias[2] = {0.0f, 0.0f};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int tap = 0; tap < 4; ++tap)
            w[n][tap] = to_float(params.w[which][(wide_channel + n) * params.w_stride[which] + tap]);
        if (params.conv_bias[which]) bias[n] = to_float(params.conv_bias[which][wide_channel + n]);
    }

    KDA_ACTIVATION* ring = nullptr;
    if (writes && params.ring_v && which != kQ)
        ring = channel + (which == kK_ ? params.ring_k + request.ring * params.ring_k_slot_stride +
                                             request.key_head * params.ring_k_head_stride
                                       : params.ring_v + request.ring * params.ring_v_slot_stride +
                                             request.head * params.ring_v_head_stride);
    const long long window_channel = params.window_channel_stride[which],
                    window_tap = params.window_tap_stride[which];
    KDA_ACTIVATION* window = nullptr;
    if (writes && params.windows[which])
        window = params.windows[which] + request.scratch * params.window_row_stride[which] +
                 wide_channel * window_channel;
    float2 f0 = to_float2(h0), f1 = to_float2(h1), f2 = to_float2(h2);
#pragma unroll
    for (int j = 0; j < kTokens; ++j) {
        float2 act = make_float2(0.0f, 0.0f);
        if (j < request.tokens) {
            const float2 now = to_float2(raw[j]);
            const Channels rounded =
                from_float2<KDA_ACTIVATION>(make_float2(conv_silu(w[0], bias[0], f0.x, f1.x, f2.x, now.x),
                                                        conv_silu(w[1], bias[1], f0.y, f1.y, f2.y, now.y)));
            act = to_float2(rounded);
            h0 = h1, h1 = h2, h2 = raw[j];
            f0 = f1, f1 = f2, f2 = now;
            if (window) {
                store_pair<kVector>(window, h0, window_channel);
                store_pair<kVector>(window + window_tap, h1, window_channel);
                store_pair<kVector>(window + 2 * window_tap, h2, window_channel);
                window += params.window_step_stride[which];
            }
            if (ring && j < params.ring_steps) store_pair<kVector>(ring + j * kK, rounded);
        }
        *reinterpret_cast<float2*>(&to[j][channel]) = act;
    }
}

// Decays of two keys and their running products; beta of one token in the first kTokens threads.
template <typename C>
__device__ __forceinline__ void gates(const MtpVerifyParams& params, const Request& request, C& chain) {
    const int thread = threadIdx.x % 64, key = 2 * thread, wide_key = request.head * kK + key;
    const KDA_G* raw = params.g + request.first_token * params.g_stride + wide_key;
    Pair<KDA_G> g[kTokens];
#pragma unroll
    for (int j = 0; j < kTokens; ++j) {
        if (j < request.tokens) g[j] = load_pair<kVector>(raw);
        raw += params.g_stride;
    }
    const float bias[2] = {to_float(params.dt_bias[wide_key]), to_float(params.dt_bias[wide_key + 1])};
    const float rate = decay_rate(params.A_log ? to_float(params.A_log[request.head]) : 0.0f);
    float* const ring = params.ring_g
                            ? params.ring_g + request.ring * params.ring_g_slot_stride +
                                  static_cast<long long>(request.head) * params.ring_steps * kK + key
                            : nullptr;
    float2 growth = make_float2(1.0f, 1.0f);
#pragma unroll
    for (int j = 0; j < kTokens; ++j) {
        float2 log = make_float2(0.0f, 0.0f);
        if (j < request.tokens) {
            const float2 x = to_float2(g[j]);
            log.x = log_decay<kBounded>(x.x + bias[0], rate, params.lower_bound);
            log.y = log_decay<kBounded>(x.y + bias[1], rate, params.lower_bound);
            if (ring && j < params.ring_steps) store_pair<kVector>(ring + j * kK, Pair<float>{log.x, log.y});
        }
        const float2 decay = make_float2(expf(log.x), expf(log.y));
        growth.x *= decay.x, growth.y *= decay.y;
        *reinterpret_cast<float2*>(&chain.decay[j][key]) = decay;
        *reinterpret_cast<float2*>(&chain.growth[j][key]) = growth;
    }
    if (thread < kTokens) {
        float beta = 0.0f;
        if (thread < request.tokens) {
            beta = params.beta_scale *
                   sigmoid(to_float(params.beta[(request.first_token + thread) * params.beta_stride +
                                                request.head * params.beta_head_stride]));
            if (params.ring_beta && thread < params.ring_steps)
                params.ring_beta[request.ring * params.ring_beta_slot_stride +
                                 static_cast<long long>(request.head) * params.ring_steps + thread] = beta;
        }
        chain.beta[thread] = beta;
    }
}

__device__ __forceinline__ void zero_rows(const MtpVerifyParams& params, int head, long long first,
                                          long long end, long long step) {
    for (long long token = first; token < end; token += step)
        if (threadIdx.x < kV)
            params.out[token * params.out_stride + head * kV + threadIdx.x] =
                from_float<KDA_ACTIVATION>(0.0f);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, kTokens == 8 && kVector ? 2 : 1)
    mtp_verify(const __grid_constant__ MtpVerifyParams params) {
    // Grid (HV / H, H, requests of this launch).
    extern __shared__ float4 shared[];
    auto& chain = *reinterpret_cast<Chain<kTokens, 2>*>(shared);
    float (&squares)[kWarps][kTokens] =
        *reinterpret_cast<float (*)[kWarps][kTokens]>(chain.operand);  // free by then

    Request request;
    request.row = params.first_request + blockIdx.z;
    request.key_head = blockIdx.y;
    request.head = blockIdx.y * gridDim.x + blockIdx.x;
    request.first_of_group = blockIdx.x == 0;
    request.slot = load_index(params.ssm_state_indices, params.slot_index_is_64bit,
                              request.row * params.slot_index_stride);
    request.first_token = load_index(params.cu_seqlens, params.cu_seqlens_is_64bit, request.row);
    const long long end = load_index(params.cu_seqlens, params.cu_seqlens_is_64bit, request.row + 1);
    const long long all = load_index(params.cu_seqlens, params.cu_seqlens_is_64bit, params.requests);
    const bool needs_scratch = params.intermediate_ssm || params.windows[0];
    request.scratch = needs_scratch
                          ? load_index(params.intermediate_state_indices, params.scratch_index_is_64bit,
                                       request.row * params.scratch_index_stride)
                          : 0;
    request.ring = params.ring_v && params.ring_indices
                       ? load_index(params.ring_indices, params.ring_index_is_64bit,
                                    request.row * params.ring_index_stride)
                       : request.slot;

    zero_rows(params, request.head, (all < 0 ? 0 : all) + request.row, params.tokens, params.requests);

    // The first fault of a request is noted once, by its first head; operand numbers are those of OPERANDS in mtp_params.py.
    const long long length = end - request.first_token;
    int operand = -1;
    long long value = 0, limit = 0;
    const bool padding = request.slot <= params.null_index;
    if (!padding) {
        if (length < 0 || length > params.max_tokens || request.first_token < 0 || end > params.tokens)
            operand = 1, value = length, limit = params.max_tokens;
        else if (length == 0)
            return;
        else if (request.slot >= params.slots)
            operand = 0, value = request.slot, limit = params.slots;
        else if (needs_scratch && (request.scratch < 0 || request.scratch >= params.scratch_rows))
            operand = 2, value = request.scratch, limit = params.scratch_rows;
        else if (params.ring_v && (request.ring < 0 || request.ring >= params.ring_rows))
            operand = 3, value = request.ring, limit = params.ring_rows;
    }
    if (padding || operand >= 0) {
        if (operand >= 0 && request.head == 0 && threadIdx.x == 0)
            record_error(params.errors, params.operation, operand, request.row, value, limit);
        zero_rows(params, request.head, request.first_token < 0 ? 0 : request.first_token,
                  end < params.tokens ? end : params.tokens, 1);
        return;
    }
    request.tokens = static_cast<int>(length);

    HeadState S;
    load_state(S, params.recurrent_state + request.slot * params.state_slot_stride +
                      static_cast<long long>(request.head) * (kV * kK));
    const int which = threadIdx.x / 64;  // two warps each for q, k, v and the gates
    if (which < 3)
        activate(params, request, which, which == kQ ? chain.q : which == kK_ ? chain.k : chain.v);
    else
        gates(params, request, chain);
    __syncthreads();
    normalize(chain, params.normalize_qk, params.scale);
    __syncthreads();
    coefficients(chain, request.tokens);
    multiply(chain, S);
    __syncthreads();

    float u[kTokens];
    substitute(chain, request.tokens, u);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, value_row = 16 * warp + lane % 16;
    KDA_ACTIVATION* const out =
        params.out + request.first_token * params.out_stride + request.head * kV + value_row;
    float o[kTokens];
#pragma unroll
    for (int j = 0; j < kTokens; ++j) o[j] = j < request.tokens ? output(chain, j, u) : 0.0f;
    if (params.onorm_gate) {
        const float weight = to_float(params.onorm_weight[value_row]);
        const KDA_ACTIVATION* const gate = params.onorm_gate +
                                           request.first_token * params.onorm_gate_stride +
                                           request.head * kV + value_row;
#pragma unroll
        for (int j = 0; j < kTokens; ++j) {
            const float square = sum_lanes<16>(o[j] * o[j]);
            if (lane == 0) squares[warp][j] = square;
        }
        __syncthreads();
#pragma unroll
        for (int j = 0; j < kTokens; ++j) {
            if (j >= request.tokens) break;
            float mean = 0.0f;
#pragma unroll
            for (int n = 0; n < kWarps; ++n) mean += squares[n][j];
            const float norm = rsqrtf(mean * (1.0f / kV) + params.onorm_eps);
            o[j] *= norm * weight * sigmoid(to_float(gate[j * params.onorm_gate_stride]));
        }
    }
#pragma unroll
    for (int j = 0; j < kTokens; ++j)
        if (j < request.tokens && lane < 16) out[j * params.out_stride] = from_float<KDA_ACTIVATION>(o[j]);

    if (params.intermediate_ssm) {
        float* snapshot = params.intermediate_ssm + request.scratch * params.snapshot_row_stride +
                          static_cast<long long>(request.head) * (kV * kK);
        keep_corrections(chain, u);
#pragma unroll 1
        for (int j = 0; j < request.tokens; ++j) {
            advance(S, chain, j);
            store_state(snapshot, S);
            snapshot += params.snapshot_step_stride;
        }
    }
}
