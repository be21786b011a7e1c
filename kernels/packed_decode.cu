// SPDX-License-Identifier: Apache-2.0
// One decode token of a gated delta rule (KDA or GDN), projections packed in one row, state updated in place.
//
//   q <- q / sqrt(sum q^2 + 1e-6) * scale      k <- k / sqrt(sum k^2 + 1e-6)
//   S <- S exp(g)             decay, per key column (KDA) or per head (GDN)
//   u  = beta (v - S k)       what the decayed state got wrong
//   S <- S + u k^T            rank-one correction
//   o  = S q                  read with the corrected state
//
// in the form of kernels/delta.cuh, whose sums have the order that kernels/decode_step.cu has too: the state is only read,
// scaled, corrected and written.
//
// Who owns what. S is [slot][HV][V][K] fp32, K contiguous. A block is one warp; it owns kRows value rows of one
// head of one batch row. A lane owns 4 adjacent keys of a row (one float4; 8 keys at K = 256), and 16 or 32 lanes
// span a row. All eight float4 loads of a lane are in flight before the first is used: 4 KiB a warp. Splitting V
// over blocks never touches the order of a sum over K, which is why a row has the same bits in every batch.
//
// Bytes. V*K*4 read and as many written per head, everything else is about 1 KiB: the floor is a kernel that
// scales the state (kernels/yardstick.cu).
//
// Order of blocks. Tiles, then heads, then rows, as the state lies in memory: a slot is megabytes in one piece, and
// walking all rows at one head first cost 4 % at B = 256 (H200).
//
// Small batches. A block's code runs once, front to back, so a small batch waits for instructions as well as for
// memory: 900 instructions took 1.8 times as long as the yardstick at one row of 12 heads, 610 take 1.2. Hence
// nothing is divided by a number that the compiler does not know, alignment is a variant and not a branch, and
// slow paths of the maths library are avoided. The slot index is loaded first, the small operands behind it, the
// state as soon as the slot is known; gates and norms are computed while the state is on its way.
//
// A slot <= null_index is padding: nothing of the pool is touched, o is zero. A slot >= slots likewise, and it is recorded.

#include "memory.cuh"
#include "warp.cuh"
#include "delta.cuh"
#include "gates.cuh"
#include "guard.cuh"

// Mirrors PackedDecodeParams in kda_cupy/ops/packed_decode.py, field by field. Strides in elements.
struct PackedDecodeParams {
    const KDA_ACTIVATION* mixed_qkv;  // [B][H*K | H*K | HV*V]
    const KDA_A* a;                   // [B][HV*K] (KDA) or [B][HV] (GDN)
    const KDA_B* b;                   // [B][HV]
    const KDA_A_LOG* A_log;           // [HV], or null for exp(A_log) = 1
    const KDA_DT_BIAS* dt_bias;       // [HV*K] or [HV]
    float* state;                     // [slots][HV][V][K]
    const void* indices;              // [B]
    KDA_ACTIVATION* out;              // [B][HV][V]
    ErrorRecord* errors;
    long long first_row;  // of this launch: the z axis of a grid stops at 65,535 blocks, a batch need not
    long long qkv_stride, a_stride, b_stride, slot_stride, index_stride, slots;
    int null_index, index_is_64bit, normalize_qk;
    float scale, lower_bound, beta_scale;
    int operation;
};

namespace {

constexpr int kK = KDA_K, kV = KDA_V;
constexpr bool kPerKeyGate = KDA_PER_KEY_GATE, kBounded = KDA_BOUNDED, kVector = KDA_VECTOR;

constexpr int kGroups = kK / 4;                          // float4 groups of a row
constexpr int kLanes = kGroups <= 16 ? 16 : 32;          // lanes that span a row
constexpr int kParts = (kGroups + kLanes - 1) / kLanes;  // float4 groups a lane owns in a row
constexpr int kSteps = 8;                                // rows a lane holds
constexpr int kRows = kSteps * 32 / kLanes;              // rows a block owns
constexpr int kShare = kLanes / (2 * kSteps);            // lanes that end up with one of a row's two sums
constexpr int kTiles = (kV + kRows - 1) / kRows;
constexpr bool kWholeTiles = kV % kRows == 0, kWholeRows = kGroups % kLanes == 0;

static_assert(kK % 4 == 0 && kK <= 512, "a lane owns whole float4 groups");
static_assert(sizeof(PackedDecodeParams) == KDA_PARAMS_BYTES,
              "host and device disagree about the parameters");

// The keys of one lane: part p holds keys 4 * (lane_in_row + p * kLanes) and the three after it.
using Keys = float[kParts][4];

template <typename T> __device__ __forceinline__ void load_keys(const T* row, int lane_in_row, Keys& to) {
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
        const int group = lane_in_row + p * kLanes;
        if (kWholeRows || group < kGroups) {
            load4<kVector>(row + 4 * group, to[p]);
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) to[p][i] = 0.0f;
        }
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(32)
    packed_decode(const __grid_constant__ PackedDecodeParams params) {
    // Grid (HV / H * kTiles, H, rows of this launch).
    const unsigned row = static_cast<unsigned>(params.first_row) + blockIdx.z;
    const int tile = blockIdx.x % kTiles, group_size = gridDim.x / kTiles;
    const int key_head = blockIdx.y, head = key_head * group_size + blockIdx.x / kTiles;
    const int lane = threadIdx.x, lane_in_row = lane % kLanes;

    const long long slot = load_index(params.indices, params.index_is_64bit, row * params.index_stride);

    // Small operands: in flight together with the slot index.
    const KDA_ACTIVATION* const qkv = params.mixed_qkv + row * params.qkv_stride;
    const int qk_width = gridDim.y * kK;
    Keys q, k, raw, bias;
    load_keys(qkv + key_head * kK, lane_in_row, q);
    load_keys(qkv + qk_width + key_head * kK, lane_in_row, k);
    if (kPerKeyGate) {
        load_keys(params.a + row * params.a_stride + static_cast<long long>(head) * kK, lane_in_row, raw);
        load_keys(params.dt_bias + static_cast<long long>(head) * kK, lane_in_row, bias);
    } else {
        raw[0][0] = to_float(params.a[row * params.a_stride + head]);
        bias[0][0] = to_float(params.dt_bias[head]);
    }
    const float raw_beta = to_float(params.b[row * params.b_stride + head]);
    const float A_log = params.A_log ? to_float(params.A_log[head]) : 0.0f;

    // After the sums this lane speaks for one row of the tile: `own_row`.
    const int own_row = tile * kRows + lane_in_row / (2 * kShare) * (32 / kLanes) + lane / kLanes;
    const bool own_row_exists = kWholeTiles || own_row < kV;
    const float v =
        own_row_exists ? to_float(qkv[2 * qk_width + static_cast<long long>(head) * kV + own_row]) : 0.0f;
    KDA_ACTIVATION* const out =
        params.out + (static_cast<long long>(row) * (gridDim.y * group_size) + head) * kV + own_row;
    const bool writes_out = own_row_exists && lane_in_row % (2 * kShare) == 0;

    if (slot <= params.null_index || slot >= params.slots) {
        if (slot >= params.slots && tile == 0 && head == 0 && lane == 0)
            record_error(params.errors, params.operation, 0, row, slot, params.slots);
        if (writes_out) *out = from_float<KDA_ACTIVATION>(0.0f);
        return;
    }

    float* const state = params.state + slot * params.slot_stride + static_cast<long long>(head) * (kV * kK);
    const int first_row =
        tile * kRows + lane / kLanes;  // step s of this lane is row first_row + s * 32 / kLanes
    float4 S[kSteps][kParts];
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
#pragma unroll
        for (int p = 0; p < kParts; ++p) {
            const int r = first_row + s * (32 / kLanes), group = lane_in_row + p * kLanes;
            if ((kWholeTiles || r < kV) && (kWholeRows || group < kGroups))
                S[s][p] = load_streaming(state + r * kK + 4 * group);
            else
                S[s][p] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }

    // In the shadow of those loads: norms, gates, and the products that need no state.
    float q_scale = params.scale, k_scale = 1.0f;
    if (params.normalize_qk) {
        q_scale *= rsqrtf(sum_lanes<kLanes>(dot(q, q)) + 1e-6f);
        k_scale = rsqrtf(sum_lanes<kLanes>(dot(k, k)) + 1e-6f);
    }
    const float rate = decay_rate(A_log);
    const float head_decay =
        kPerKeyGate ? 0.0f : expf(log_decay<kBounded>(raw[0][0] + bias[0][0], rate, params.lower_bound));
    Keys decay, decayed_q, decayed_k;
#pragma unroll
    for (int p = 0; p < kParts; ++p)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            q[p][i] *= q_scale;
            k[p][i] *= k_scale;
            decay[p][i] = kPerKeyGate
                              ? expf(log_decay<kBounded>(raw[p][i] + bias[p][i], rate, params.lower_bound))
                              : head_decay;
            decayed_q[p][i] = q[p][i] * decay[p][i];
            decayed_k[p][i] = k[p][i] * decay[p][i];
        }
    const float kq = sum_lanes<kLanes>(dot(k, q));
    const float beta = params.beta_scale * sigmoid(raw_beta);

    float sums[2 * kSteps];
    multiply_rows(S, decayed_k, decayed_q, sums);
    const auto [u, o] = correct_row<kLanes, kSteps>(sums, lane, v, beta, kq);
    if (writes_out) *out = from_float<KDA_ACTIVATION>(o);

#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
        const float u_s = __shfl_sync(kAllLanes, u, s * 2 * kShare, kLanes);
#pragma unroll
        for (int p = 0; p < kParts; ++p) {
            const int r = first_row + s * (32 / kLanes), group = lane_in_row + p * kLanes;
            const float4 x = decay_and_add(S[s][p], decay[p], u_s, k[p]);
            if ((kWholeTiles || r < kV) && (kWholeRows || group < kGroups))
                store_streaming(state + r * kK + 4 * group, x);
        }
    }
}
