// SPDX-License-Identifier: Apache-2.0
// What the state alone costs: kernels that move it and do nothing with it. Every time is reported as a ratio to
// one of these, in the same process and over the same slots; that survives another GPU.
//
//   RW     S <- S * factor                                64 KiB read, 64 KiB written a head of 128 x 128
//   R      sum(S)                                         64 KiB read
//   SNAP   copies[j] <- S * factor^(j+1), j < steps       64 KiB read, steps * 64 KiB written
//
// Who owns what. S is [slot][HV][V][K] fp32, and blocks walk it in that order, as those of kernels/packed_decode.cu do.
// A warp owns neighbouring elements of one head, 128 for each of its loads; a lane has all its float4 loads in flight
// before it uses the first, with the same streaming hints as the operations. One warp a block and 8 loads a lane
// (4 KiB a warp) is the best shape for stores. Reads alone have a second one, 8 warps a block and 16 loads a lane: of
// the two, whichever is faster at a batch size counts.
//
// The factor is an operand, or the compiler would see that 1 changes nothing. The benchmark takes -1: it changes
// every element, and never makes zeros of them, which move faster than data. For R it is a sum that no lane finds, and
// a store hangs on that: without one the loads would be removed.

#include "memory.cuh"
#include "guard.cuh"

#define KDA_RW 0
#define KDA_R 1
#define KDA_SNAP 2

// Mirrors YardstickParams in kda_cupy/bench/yardstick.py, field by field. Strides in elements.
struct YardstickParams {
    float* state;         // [slots][HV][V][K]
    const void* indices;  // [B]: slot of each row
    float* copies;        // SNAP: [copy_rows][steps][HV][V][K]. R: one element, written if a sum is `factor`
    const void* copy_indices;  // SNAP: [B], row of copies
    long long first_row;       // of this launch
    long long slot_stride, index_stride, slots;
    long long copy_row_stride, copy_step_stride, copy_index_stride, copy_rows;
    int index_is_64bit, copy_index_is_64bit;
    int steps;  // of SNAP
    float factor;
};

namespace {

constexpr int kHeadElements = KDA_V * KDA_K;
constexpr int kWarps = KDA_WARPS;
constexpr int kLoads = KDA_LOADS;  // float4 loads a lane has in flight
constexpr int kTileElements = kWarps * kLoads * 32 * 4;
constexpr bool kWholeTiles = kHeadElements % kTileElements == 0;

static_assert(kHeadElements % 4 == 0, "a lane moves whole float4 groups");
static_assert(sizeof(YardstickParams) == KDA_PARAMS_BYTES, "host and device disagree about the parameters");

}  // namespace

extern "C" __global__ void __launch_bounds__(kWarps * 32)
    yardstick(const __grid_constant__ YardstickParams params) {
    // Grid (tiles of a head, HV, rows of this launch). Load i of a lane is at first + i * 128.
    const long long row = params.first_row + blockIdx.z;
    const long long slot = load_index(params.indices, params.index_is_64bit, row * params.index_stride);
    if (slot < 0 || slot >= params.slots) return;

    const long long head = blockIdx.y * static_cast<long long>(kHeadElements);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first = (blockIdx.x * kWarps + warp) * (kLoads * 128) + 4 * lane;
    float* const S = params.state + slot * params.slot_stride + head + first;
    float4 x[kLoads] = {};
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
        if (kWholeTiles || first + i * 128 < kHeadElements) x[i] = load_streaming(S + i * 128);

    const float f = params.factor;
    if constexpr (KDA_MOVES == KDA_R) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < kLoads; ++i) sum += (x[i].x + x[i].y) + (x[i].z + x[i].w);
        if (sum == f) *params.copies = sum;
        return;
    }

    float* to = S;
    int steps = 1;
    if constexpr (KDA_MOVES == KDA_SNAP) {
        const long long copy =
            load_index(params.copy_indices, params.copy_index_is_64bit, row * params.copy_index_stride);
        if (copy < 0 || copy >= params.copy_rows) return;
        to = params.copies + copy * params.copy_row_stride + head + first;
        steps = params.steps;
    }
    for (int step = 0; step < steps; ++step, to += params.copy_step_stride) {
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            if (!kWholeTiles && first + i * 128 >= kHeadElements) continue;
            x[i] = make_float4(x[i].x * f, x[i].y * f, x[i].z * f, x[i].w * f);
            store_streaming(to + i * 128, x[i]);
        }
    }
}
