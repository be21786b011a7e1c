// SPDX-License-Identifier: Apache-2.0
// Sums over groups of lanes. Every order of addition is fixed by the lane number alone, so a result never
// depends on the batch around it.

#pragma once

constexpr unsigned kAllLanes = 0xffffffffu;

// Sum over kLanes neighbouring lanes, known to all of them afterwards.
template <int kLanes> __device__ __forceinline__ float sum_lanes(float x) {
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
    return x;
}

// Sums of 16 values over kLanes (16 or 32) neighbouring lanes, in 16 shuffles or fewer instead of 16 * log2(kLanes).
// At each step a lane hands half of its values to its partner and keeps the partner's other half; what is left
// in the end is the whole sum of value number `lane / (kLanes / 16)`.
template <int kLanes> __device__ __forceinline__ float sum_lanes_16(float (&x)[16], int lane) {
    static_assert(kLanes == 16 || kLanes == 32, "a group is half a warp or a warp");
#pragma unroll
    for (int count = 8, step = kLanes / 2; count > 0; count /= 2, step /= 2) {
        const bool upper = lane & step;
#pragma unroll
        for (int i = 0; i < count; ++i) {
            const float keep = upper ? x[i + count] : x[i];
            const float give = upper ? x[i] : x[i + count];
            x[i] = keep + __shfl_xor_sync(kAllLanes, give, step);
        }
    }
    return kLanes == 32 ? x[0] + __shfl_xor_sync(kAllLanes, x[0], 1) : x[0];
}
