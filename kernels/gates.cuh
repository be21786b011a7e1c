// SPDX-License-Identifier: Apache-2.0
// How much a token forgets, and how strongly it writes. All fp32.
//
//   x = raw + dt_bias
//   bounded     g = lower_bound * sigmoid(exp(A_log) * x)      lower_bound < 0; not a clamp of the other one
//   unbounded   g = -exp(A_log) * softplus(x)                  softplus(x) = x above 20, else log1p(exp(x))
//   decay = exp(g),   beta = sigmoid(b)
//
// expf and log1pf are the accurate ones: they run in the shadow of the state loads and cost nothing there, while
// approximate ones would show in the state after a few tokens. The reciprocal is the hardware's (1 ulp): the exact
// one brings a slow path of its own into the code, and code that runs once is paid for by its length.

#pragma once

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + expf(-x)); }

// exp(A_log), kept finite so that rate * 0 is 0 however large A_log is.
// A NaN stays one: fminf would return the other number.
__device__ __forceinline__ float decay_rate(float A_log) {
    const float rate = expf(A_log);
    return rate > 3.402823466e38f ? 3.402823466e38f : rate;
}

__device__ __forceinline__ float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// Log decay of one gate.
template <bool kBounded> __device__ __forceinline__ float log_decay(float x, float rate, float lower_bound) {
    return kBounded ? lower_bound * sigmoid(rate * x) : -rate * softplus(x);
}
