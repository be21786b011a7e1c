// SPDX-License-Identifier: Apache-2.0
// The short causal convolution in front of q, k and v. One channel, one token: kWidth taps over the kWidth - 1 raw inputs
// before it, oldest first, and the token itself; then SiLU. The caller rounds the result to the activation dtype.
//
//   y = bias + w0 h0 + w1 h1 + w2 h2 + w3 x          act = y sigmoid(y)
//
// The approximate exponential is off by a few units in the last place where it decides little, and rounding to 16 bits
// hides even that.

#pragma once

template <int kWidth>
__device__ __forceinline__ float convolve(const float (&w)[kWidth], float bias,
                                          const float (&window)[kWidth]) {
    float y = bias;
#pragma unroll
    for (int tap = 0; tap < kWidth; ++tap) y = fmaf(w[tap], window[tap], y);
    return y;
}

__device__ __forceinline__ float silu(float y) { return __fdividef(y, 1.0f + __expf(-y)); }

__device__ __forceinline__ float conv_silu(const float (&w)[4], float bias, float h0, float h1, float h2,
                                           float x) {
    const float window[4] = {h0, h1, h2, x};
    return silu(convolve(w, bias, window));
}
