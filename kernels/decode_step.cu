// SPDX-License-Identifier: Apache-2.0
// One whole decode token of KDA or GDN in one launch: causal convolution with its history rolled in place, gates, norms,
// the delta rule with the state updated in place, and the gated output norm.
//
//   act(x) = silu(w . (history, x))           per channel of q, k, v; rounded to the activation dtype; kernels/conv.cuh
//   S, o   = one token of the delta rule      kernels/delta.cuh, in the order of kernels/packed_decode.cu: same bits
//   out    = o rsqrt(mean_v o^2 + eps) weight gate(z)     gate = sigmoid (KDA) or silu (GDN); o itself without a norm
//
// Who owns what. K = V = 128. A block is one q/k head of one row, with kHeads of the value heads that read it: a team of
// 16 warps each. Warp w of a team owns value rows 8 w to 8 w + 7 of its state, a lane 4 adjacent keys: eight float4, all
// in flight before anything waits, 64 KiB a team. In their shadow a team prepares its token in shared memory, a
// channel a thread: 128 threads each for q, k, v and the gates of the keys. One barrier; then every warp works on its
// own rows as packed_decode does; the norm needs the squares of all 128 rows, sixteen sums and a second barrier, behind
// the stores of the state.
//
// Why a block a head. The history of q and k belongs to all value heads of the group and is rolled by the thread that
// read it, so no other block may read it. With one value head a key head that costs nothing. A larger group is walked by
// the block, kHeads at a time, each row of the next state being loaded as soon as the row before it is stored.
//
// Bytes, a value head: 64 KiB of state read and as many written, and about 3 KiB besides: the floor is that of
// packed_decode. Code that runs once is paid for by its length (see there), so each phase is written once: q, k and v
// are one piece of code, gates are computed a key a thread and not four keys in every warp.
//
// A slot <= null_index is padding: nothing of pool and history is touched, out is zero. A slot >= slots likewise, and
// it is recorded.

#include "memory.cuh"
#include "warp.cuh"
#include "delta.cuh"
#include "gates.cuh"
#include "conv.cuh"
#include "guard.cuh"

// Mirrors StepPointers and StepLayout in kda_cupy/ops/step_params.py, field by field; arrays of three are q, k, v.
struct DecodeStepParams {
    const KDA_ACTIVATION* x[3];
    const KDA_CONV_WEIGHT* w[3];
    const KDA_CONV_WEIGHT* conv_bias[3];
    KDA_ACTIVATION* cs[3];
    const KDA_G* g;
    const KDA_BETA* beta;
    const KDA_A_LOG* A_log;
    const KDA_DT_BIAS* dt_bias;
    float* recurrent_state;
    const void* ssm_state_indices;
    const KDA_ACTIVATION* onorm_gate;
    const KDA_ONORM_WEIGHT* onorm_weight;
    KDA_ACTIVATION* out;
    ErrorRecord* errors;
    long long first_row;  // of this launch: the z axis of a grid stops at 65,535 blocks, a batch need not
    long long x_stride[3], w_stride[3], cs_slot_stride[3], cs_channel_stride[3], cs_tap_stride[3];
    long long g_stride, beta_stride, beta_head_stride, state_slot_stride, onorm_gate_stride, out_stride,
        slot_index_stride, slots;
    int null_index, slot_index_is_64bit, normalize_qk, operation;
    float scale, lower_bound, beta_scale, onorm_eps;
};

namespace {

constexpr bool kPerKeyGate = KDA_PER_KEY_GATE, kBounded = KDA_BOUNDED, kVector = KDA_VECTOR;
constexpr int kHeads = KDA_HEADS, kPasses = KDA_GROUP / kHeads;
constexpr int kK = 128, kV = 128;
constexpr int kRows = 8;                // of a warp
constexpr int kTeam = 32 * kV / kRows;  // threads of a value head
constexpr int kThreads = kHeads * kTeam, kBlocks = kPasses == 1 ? 1024 / kThreads : 1;  // blocks an SM has

static_assert(kHeads * kPasses == KDA_GROUP, "a block takes the value heads of its group in whole teams");
static_assert(sizeof(DecodeStepParams) == KDA_PARAMS_BYTES, "host and device disagree about the parameters");

enum { kQ, kKey, kValue, kGates };  // what a thread prepares

struct Shared {
    float act[2][kK];  // q and k, activated
    struct alignas(16) Head {
        float v[kV];       // activated
        float decay[kK];   // exp(g)
        float factor[kV];  // what the output norm multiplies by
        float squares[kV / kRows];
        float beta;
    } heads[kHeads];
};

// Four numbers of a row in shared memory.
__device__ __forceinline__ void load_shared(const float* from, float (&to)[1][4]) {
    const float4 x = *reinterpret_cast<const float4*>(from);
    to[0][0] = x.x, to[0][1] = x.y, to[0][2] = x.z, to[0][3] = x.w;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
    decode_step(const __grid_constant__ DecodeStepParams params) {
    // Grid (H, 1, rows of this launch).
    __shared__ alignas(16) Shared shared;

    const unsigned row = static_cast<unsigned>(params.first_row) + blockIdx.z;
    const LoadedIndex loaded =
        start_index(params.ssm_state_indices, params.slot_index_is_64bit, row * params.slot_index_stride);
    const int lane = threadIdx.x % 32, warp = threadIdx.x % kTeam / 32;
    const int part = threadIdx.x / kK % 4, channel = threadIdx.x % kK;
    const int key_head = blockIdx.x, team = threadIdx.x / kTeam;
    Shared::Head& mine = shared.heads[team];
    const int own_row = kRows * warp + lane / 4;  // of which this lane holds u and o in the end

    float* state = nullptr;
    float4 S[kRows][1];
#pragma unroll 1
    for (int pass = 0; pass < kPasses; ++pass) {
        const int head = (key_head * kPasses + pass) * kHeads + team;
        const auto write = [&](float o) {
            if (lane % 4 == 0)
                params.out[row * params.out_stride + head * kV + own_row] = from_float<KDA_ACTIVATION>(o);
        };

        // What needs no slot is in flight together with it, and stays as it was loaded: nothing waits before the
        // loads of the state.
        const bool convolves = part == kValue || (part < kValue && pass == 0 && team == 0);
        const int wide_channel = (part == kValue ? head : key_head) * kK + channel;
        KDA_ACTIVATION x, z, h0, h1, h2;
        Four<KDA_CONV_WEIGHT> w;
        KDA_CONV_WEIGHT bias = {};
        KDA_ONORM_WEIGHT weight;
        KDA_G raw;
        KDA_DT_BIAS dt_bias;
        KDA_A_LOG A_log = {};
        KDA_BETA raw_beta;
        if (convolves) {
            x = params.x[part][row * params.x_stride[part] + wide_channel];
            w = load_four<kVector>(params.w[part] + wide_channel * params.w_stride[part]);
            if (params.conv_bias[part]) bias = params.conv_bias[part][wide_channel];
            if (part == kValue && params.onorm_gate) {
                z = params.onorm_gate[row * params.onorm_gate_stride + wide_channel];
                weight = params.onorm_weight[channel];
            }
        } else if (part == kGates) {
            const int place = kPerKeyGate ? head * kK + channel : head;
            raw = params.g[row * params.g_stride + place];
            dt_bias = params.dt_bias[place];
            if (params.A_log) A_log = params.A_log[head];
            raw_beta = params.beta[row * params.beta_stride + head * params.beta_head_stride];
        }

        const long long slot = finish_index(loaded, params.slot_index_is_64bit);
        if (slot <= params.null_index || slot >= params.slots) {
            if (slot >= params.slots && head == 0 && threadIdx.x == 0)
                record_error(params.errors, params.operation, 0, row, slot, params.slots);
            write(0.0f);
            continue;
        }

        KDA_ACTIVATION* history;
        const long long tap = convolves ? params.cs_tap_stride[part] : 0;
        if (convolves) {
            history = params.cs[part] + slot * params.cs_slot_stride[part] +
                      wide_channel * params.cs_channel_stride[part];
            h0 = history[0], h1 = history[tap], h2 = history[2 * tap];
        }
        if (pass == 0) {
            state = params.recurrent_state + slot * params.state_slot_stride +
                    static_cast<long long>(head) * (kV * kK) + kRows * kK * warp + 4 * lane;
#pragma unroll
            for (int s = 0; s < kRows; ++s) S[s][0] = load_streaming(state + s * kK);
        }

        if (convolves) {
            const float taps[4] = {to_float(w.values[0]), to_float(w.values[1]), to_float(w.values[2]),
                                   to_float(w.values[3])};
            const KDA_ACTIVATION rounded = from_float<KDA_ACTIVATION>(
                conv_silu(taps, to_float(bias), to_float(h0), to_float(h1), to_float(h2), to_float(x)));
            history[0] = h1, history[tap] = h2, history[2 * tap] = x;
            (part == kValue ? mine.v : shared.act[part])[channel] = to_float(rounded);
            if (part == kValue && params.onorm_gate) {
                const float gate = to_float(z);
                mine.factor[channel] = to_float(weight) * sigmoid(gate) * (kPerKeyGate ? 1.0f : gate);
            }
        } else if (part == kGates) {
            const float g = log_decay<kBounded>(to_float(raw) + to_float(dt_bias),
                                                decay_rate(to_float(A_log)), params.lower_bound);
            mine.decay[channel] = expf(g);
            const float beta = params.beta_scale * sigmoid(to_float(raw_beta));
            if (channel == 0) mine.beta = beta;
        }
        __syncthreads();

        float q[1][4], k[1][4], decay[1][4], decayed_q[1][4], decayed_k[1][4];
        load_shared(&shared.act[kQ][4 * lane], q);
        load_shared(&shared.act[kKey][4 * lane], k);
        load_shared(&mine.decay[4 * lane], decay);
        float q_scale = params.scale, k_scale = 1.0f;
        if (params.normalize_qk) {
            q_scale *= rsqrtf(sum_lanes<32>(dot(q, q)) + 1e-6f);
            k_scale = rsqrtf(sum_lanes<32>(dot(k, k)) + 1e-6f);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            q[0][i] *= q_scale;
            k[0][i] *= k_scale;
            decayed_q[0][i] = q[0][i] * decay[0][i];
            decayed_k[0][i] = k[0][i] * decay[0][i];
        }
        const float kq = sum_lanes<32>(dot(k, q));
        float sums[2 * kRows];
        multiply_rows(S, decayed_k, decayed_q, sums);
        const RowResult result = correct_row<32, kRows>(sums, lane, mine.v[own_row], mine.beta, kq);
        float o = result.o;

        if (params.onorm_gate) {
            float square = o * o;  // of the warp's rows, of which four neighbours hold one
#pragma unroll
            for (int step = 16; step >= 4; step /= 2) square += __shfl_xor_sync(kAllLanes, square, step);
            if (lane == 0) mine.squares[warp] = square;
        }
#pragma unroll
        for (int s = 0; s < kRows; ++s) {
            const float u = __shfl_sync(kAllLanes, result.u, 4 * s);
            store_streaming(state + s * kK, decay_and_add(S[s][0], decay[0], u, k[0]));
            if (kPasses > 1 && pass + 1 < kPasses)
                S[s][0] = load_streaming(state + s * kK + kHeads * kV * kK);
        }
        state += kHeads * kV * kK;
        if (params.onorm_gate) {
            __syncthreads();
            const float mean = sum_lanes<16>(mine.squares[lane % 16]) * (1.0f / kV);
            o *= rsqrtf(mean + params.onorm_eps) * mine.factor[own_row];
        }
        write(o);
        if (kPasses > 1) __syncthreads();  // the next pass writes where this one read
    }
}
