// SPDX-License-Identifier: Apache-2.0
// One channel of the short convolution, and SiLU:   y = bias + w0 h0 + w1 h1 + w2 h2 + w3 x,   y * sigmoid(y)
// Taps oldest first; h0, h1, h2 are the three raw inputs before x. The caller rounds the result to the activation dtype.
// The approximate exponential is off by a few units in the last place where it decides little, and rounding to 16 bits
// hides even that; for fp32 activations it stays below 3e-7 of the largest value of a vector.

#pragma once

__device__ __forceinline__ float conv_silu(const float (&w)[4], float bias, float h0, float h1, float h2,
                                           float x) {
    const float y = fmaf(w[3], x, fmaf(w[2], h2, fmaf(w[1], h1, fmaf(w[0], h0, bias))));
    return __fdividef(y, 1.0f + __expf(-y));
}
