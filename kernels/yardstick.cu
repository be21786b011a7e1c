// SPDX-License-Identifier: Apache-2.0
// What the state alone costs: kernels that move it and do nothing with it. Every time is reported as a ratio to
// one of these, in the same process and over the same slots; that survives another GPU.
//
//   read_write (RW)    S <- S * factor
//
// Who owns what. S is [slot][HV][V][K] fp32, and blocks walk it in that order, as those of kernels/packed_decode.cu do.
// A block is one warp and owns 1,024 neighbouring elements of one head; a lane has eight float4 loads in flight
// before it stores the first, 4 KiB a warp, with the same streaming hints.
//
// The factor is an operand, or the compiler would see that 1 changes nothing. The benchmark takes -1: it changes
// every element, and never makes zeros of them, which move faster than data.

#include "memory.cuh"
#include "guard.cuh"

// Mirrors ReadWriteParams in kda_cupy/bench/yardstick.py, field by field. Strides in elements.
struct ReadWriteParams {
    float* state;         // [slots][HV][V][K]
    const void* indices;  // [B]
    long long first_row;  // of this launch
    long long slot_stride, index_stride, slots;
    int index_is_64bit;
    float factor;
};

namespace {

constexpr int kHeadElements = KDA_V * KDA_K;
constexpr int kLoads = 8;  // float4 loads a lane has in flight
constexpr int kTileElements = kLoads * 32 * 4;
constexpr bool kWholeTiles = kHeadElements % kTileElements == 0;

static_assert(kHeadElements % 4 == 0, "a lane moves whole float4 groups");
static_assert(sizeof(ReadWriteParams) == KDA_PARAMS_BYTES, "host and device disagree about the parameters");

}  // namespace

extern "C" __global__ void __launch_bounds__(32) read_write(const __grid_constant__ ReadWriteParams params) {
    // Grid (tiles of a head, HV, rows of this launch). Load i of a lane is at first + i * 128.
    const long long row = params.first_row + blockIdx.z;
    const long long slot = load_index(params.indices, params.index_is_64bit, row * params.index_stride);
    if (slot < 0 || slot >= params.slots) return;

    const int head = blockIdx.y;
    const int first = blockIdx.x * kTileElements + 4 * threadIdx.x;
    float* const head_state =
        params.state + slot * params.slot_stride + head * static_cast<long long>(kHeadElements);
    float* const S = head_state + first;
    float4 x[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
        if (kWholeTiles || first + i * 128 < kHeadElements) x[i] = load_streaming(S + i * 128);
    const float f = params.factor;
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
        if (kWholeTiles || first + i * 128 < kHeadElements)
            store_streaming(S + i * 128, make_float4(x[i].x * f, x[i].y * f, x[i].z * f, x[i].w * f));
}
