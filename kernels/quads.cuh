// SPDX-License-Identifier: Apache-2.0
// Four neighbouring channels at a time. kVector says that they are neighbours in memory and that the address is aligned
// to all four (the host knows, from base pointers and strides); otherwise they are moved one by one, `stride` apart.

#pragma once

#include "memory.cuh"

template <typename T> struct alignas(4 * sizeof(T)) Quad {
    T of[4];
};

template <bool kVector, typename T>
__device__ __forceinline__ Quad<T> load_quad(const T* from, long long stride = 1) {
    if constexpr (kVector) return *reinterpret_cast<const Quad<T>*>(from);
    return {from[0], from[stride], from[2 * stride], from[3 * stride]};
}

template <bool kVector, typename T>
__device__ __forceinline__ void store_quad(T* to, Quad<T> x, long long stride = 1) {
    if constexpr (kVector) {
        *reinterpret_cast<Quad<T>*>(to) = x;
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) to[i * stride] = x.of[i];
    }
}

template <typename T> __device__ __forceinline__ float4 to_float4(Quad<T> x) {
    return make_float4(to_float(x.of[0]), to_float(x.of[1]), to_float(x.of[2]), to_float(x.of[3]));
}
__device__ __forceinline__ float4
to_float4(Quad<bf16> x) {  // a number is the upper half of its word: one instruction
    const uint2 words = *reinterpret_cast<const uint2*>(&x);
    return make_float4(__uint_as_float(words.x << 16), __uint_as_float(words.x & 0xffff0000u),
                       __uint_as_float(words.y << 16), __uint_as_float(words.y & 0xffff0000u));
}

// Two numbers to one word, the first in its lower half: one instruction at full speed, where a conversion of one number
// runs at a quarter of it.
template <typename Half> __device__ __forceinline__ unsigned pack(float first, float second) {
    unsigned word;
    if constexpr (Half::kIsBf16)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    return word;
}

template <typename T> __device__ __forceinline__ Quad<T> from_float4(float4 x) {
    if constexpr (sizeof(T) == 2) {
        const uint2 words = make_uint2(pack<T>(x.x, x.y), pack<T>(x.z, x.w));
        return *reinterpret_cast<const Quad<T>*>(&words);
    } else {
        return *reinterpret_cast<const Quad<T>*>(&x);
    }
}

// From global to shared memory, without waiting and without a register where kVector; there after wait_for_copies and
// a barrier.
template <bool kVector, typename T>
__device__ __forceinline__ void copy_quad(Quad<T>* to, const T* from, long long stride) {
    if constexpr (kVector) {
        asm volatile(
            "{ .reg .u64 wide; .reg .u32 at; cvta.to.shared.u64 wide, %0; cvt.u32.u64 at, wide;"
            "  cp.async.ca.shared.global [at], [%1], %2; }" ::"l"(to),
            "l"(from), "n"(sizeof(Quad<T>))
            : "memory");
    } else {
        *to = load_quad<false>(from, stride);
    }
}

__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
