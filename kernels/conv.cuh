// SPDX-License-Identifier: Apache-2.0
// The short causal convolution in front of q, k and v: four taps, then SiLU. One channel, one token.
//
//   y = bias + w0 h0 + w1 h1 + w2 h2 + w3 x      h: the three raw inputs before x, oldest first
//   act = y sigmoid(y)

#pragma once

#include "gates.cuh"

__device__ __forceinline__ float conv_silu(const float (&w)[4], float bias, float h0, float h1, float h2,
                                           float x) {
    const float y = fmaf(w[3], x, fmaf(w[2], h2, fmaf(w[1], h1, fmaf(w[0], h0, bias))));
    return y * sigmoid(y);
}
