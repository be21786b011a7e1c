// SPDX-License-Identifier: Apache-2.0
// One token of the delta rule, the part that every kernel must do in the same order for its bits to be the same.
//
//   p = S0 (k exp(g))      r = S0 (q exp(g))      u = beta (v - p)      o = r + u (k . q)      S = S0 exp(g) + u k^T
//
// Both products are taken from the state as it was loaded: S q after the correction is known without touching S again,
// so one pass of multiply-adds and one round of shuffles does for both.
//
// kLanes lanes span a row of S; a lane owns kParts float4 of it and holds kSteps rows.

#pragma once

#include "warp.cuh"

template <int kParts>
__device__ __forceinline__ float dot(const float (&x)[kParts][4], const float (&y)[kParts][4]) {
    float sum = 0.0f;
#pragma unroll
    for (int p = 0; p < kParts; ++p)
#pragma unroll
        for (int i = 0; i < 4; ++i) sum = fmaf(x[p][i], y[p][i], sum);
    return sum;
}

// p and r of the rows of a lane, its own keys only, side by side: value 2s is p of step s, value 2s + 1 is r.
template <int kSteps, int kParts>
__device__ __forceinline__ void multiply_rows(const float4 (&S)[kSteps][kParts],
                                              const float (&decayed_k)[kParts][4],
                                              const float (&decayed_q)[kParts][4],
                                              float (&sums)[2 * kSteps]) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
        float p_sum = 0.0f, r_sum = 0.0f;
#pragma unroll
        for (int p = 0; p < kParts; ++p) {
            const float x[4] = {S[s][p].x, S[s][p].y, S[s][p].z, S[s][p].w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                p_sum = fmaf(x[i], decayed_k[p][i], p_sum);
                r_sum = fmaf(x[i], decayed_q[p][i], r_sum);
            }
        }
        sums[2 * s] = p_sum, sums[2 * s + 1] = r_sum;
    }
}

// u and o of one row, known to the 2 kShare lanes that end up with its sums: the first half of them with p, the other with r.
struct RowResult {
    float u, o;
};
template <int kLanes, int kSteps>
__device__ __forceinline__ RowResult correct_row(float (&sums)[2 * kSteps], int lane, float v, float beta,
                                                 float kq) {
    constexpr int kShare = kLanes / (2 * kSteps);
    const float mine = sum_lanes_each<kLanes>(sums, lane);
    const float other = __shfl_xor_sync(kAllLanes, mine, kShare);
    const bool holds_r = lane % kLanes & kShare;
    const float u = beta * (v - (holds_r ? other : mine));
    return {u, fmaf(u, kq, holds_r ? mine : other)};
}

// Four keys of a row of S after the token.
__device__ __forceinline__ float4 decay_and_add(float4 x, const float (&decay)[4], float u,
                                                const float (&k)[4]) {
    x.x = fmaf(u, k[0], x.x * decay[0]);
    x.y = fmaf(u, k[1], x.y * decay[1]);
    x.z = fmaf(u, k[2], x.z * decay[2]);
    x.w = fmaf(u, k[3], x.w * decay[3]);
    return x;
}
