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

// Sums of kCount values over kLanes neighbouring lanes at once, in kCount shuffles or little more instead of
// kCount * log2(kLanes). At each step a lane hands half of its values to its partner and keeps the partner's other
// half; once it has one value left, the remaining steps add that one up. What a lane holds in the end is the
// whole sum of value number `lane / (kLanes / kCount)`. Recursion, because a loop that halves two counters is not unrolled.
template <int kLanes, int kCount>
__device__ __forceinline__ float sum_lanes_each(float (&x)[kCount], int lane) {
    static_assert(kCount <= kLanes, "every value needs a lane to end in");
    if constexpr (kCount == 1) {
        return sum_lanes<kLanes>(x[0]);
    } else {
        const bool upper = lane & (kLanes / 2);
        float half[kCount / 2];
#pragma unroll
        for (int i = 0; i < kCount / 2; ++i) {
            const float keep = upper ? x[i + kCount / 2] : x[i];
            const float give = upper ? x[i] : x[i + kCount / 2];
            half[i] = keep + __shfl_xor_sync(kAllLanes, give, kLanes / 2);
        }
        return sum_lanes_each<kLanes / 2>(half, lane);
    }
}

// The least of all lanes' numbers, in every lane.
__device__ __forceinline__ int min_lanes(int x) {
    int least;
    asm volatile("redux.sync.min.s32 %0, %1, %2;" : "=r"(least) : "r"(x), "r"(kAllLanes));
    return least;
}
