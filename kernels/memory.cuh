// SPDX-License-Identifier: Apache-2.0
// Moving numbers between memory and fp32 registers. Nothing in here knows about attention.
//
// No CUDA header is included anywhere: bf16 and fp16 are carried as 16-bit words and converted by PTX
// instructions, so the only thing needed to compile is NVRTC itself.

#pragma once

struct bf16 {
    static constexpr bool kIsBf16 = true;
    unsigned short bits;
};
struct fp16 {
    static constexpr bool kIsBf16 = false;
    unsigned short bits;
};

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float(unsigned(x.bits) << 16); }
__device__ __forceinline__ float to_float(fp16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

// Round to nearest even; fp32 passes through.
template <typename To> __device__ __forceinline__ To from_float(float x) {
    static_assert(sizeof(To) == 0,
                  "bfloat16 needs compute capability 8.0; the host refuses it by name first");
}
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
template <> __device__ __forceinline__ fp16 from_float<fp16>(float x) {
    fp16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}
#if __CUDA_ARCH__ >= 800
template <> __device__ __forceinline__ bf16 from_float<bf16>(float x) {
    bf16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}
#endif

// Four neighbouring elements as floats. kVector says that the address is aligned to all four of them (the host knows:
// base pointer and row stride); otherwise they are loaded one at a time.
template <bool kVector> __device__ __forceinline__ void load4(const float* from, float (&to)[4]) {
    if constexpr (kVector) {
        const float4 x = *reinterpret_cast<const float4*>(from);
        to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) to[i] = from[i];
    }
}
template <bool kVector, typename Half>
__device__ __forceinline__ void load4(const Half* from, float (&to)[4]) {
    static_assert(sizeof(Half) == 2, "bf16 or fp16");
    Half x[4];
    if constexpr (kVector) {
        const uint2 words = *reinterpret_cast<const uint2*>(from);
        x[0].bits = words.x & 0xffff, x[1].bits = words.x >> 16;
        x[2].bits = words.y & 0xffff, x[3].bits = words.y >> 16;
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = from[i];
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = to_float(x[i]);
}

// The same, as they lie in memory: for what is loaded long before it is needed, so that nothing waits in between.
template <typename T> struct alignas(4 * sizeof(T)) Four {
    T values[4];
};
template <bool kVector, typename T> __device__ __forceinline__ Four<T> load_four(const T* from) {
    if constexpr (kVector) return *reinterpret_cast<const Four<T>*>(from);
    return {from[0], from[1], from[2], from[3]};
}

// State passes through once a token: streaming hints keep it from pushing everything else out of L2.
// `volatile` holds the loads where they are written, ahead of the arithmetic that hides behind them.
__device__ __forceinline__ float4 load_streaming(const float* from) {
    float4 x;
    asm volatile("ld.global.cs.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "l"(from)
                 : "memory");
    return x;
}
__device__ __forceinline__ void store_streaming(float* to, float4 x) {
    asm volatile("st.global.cs.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x.x), "f"(x.y), "f"(x.z),
                 "f"(x.w)
                 : "memory");
}

// The same number, of which the compiler knows nothing: what is made of it is made here, and not long before, where it would
// hold a register.
__device__ __forceinline__ int opaque(int x) {
    asm volatile("" : "+r"(x));
    return x;
}
