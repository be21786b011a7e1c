// SPDX-License-Identifier: Apache-2.0
// Two neighbouring channels in one thread: half the instructions of one each. kVector says that they are neighbours in
// memory and aligned to both, so that one access moves them; otherwise each is moved alone, `stride` elements apart.

#pragma once

#include "memory.cuh"

template <typename T> struct alignas(2 * sizeof(T)) Pair {
    T first, second;
};

template <bool kVector, typename T>
__device__ __forceinline__ Pair<T> load_pair(const T* from, long long stride = 1) {
    if constexpr (kVector) return *reinterpret_cast<const Pair<T>*>(from);
    return {from[0], from[stride]};
}

template <bool kVector, typename T>
__device__ __forceinline__ void store_pair(T* to, Pair<T> x, long long stride = 1) {
    if constexpr (kVector) {
        *reinterpret_cast<Pair<T>*>(to) = x;
    } else {
        to[0] = x.first, to[stride] = x.second;
    }
}

template <typename T> __device__ __forceinline__ float2 to_float2(Pair<T> x) {
    return make_float2(to_float(x.first), to_float(x.second));
}

template <typename T> __device__ __forceinline__ Pair<T> from_float2(float2 x) {
    return {from_float<T>(x.x), from_float<T>(x.y)};
}
