// SPDX-License-Identifier: Apache-2.0
// A product of fp32 matrices on tensor cores that only know tf32 (10 bits of mantissa), with fp32 accuracy.
//
// x = head + rest, where head is x with the lower 13 bits cleared, so that both parts and their difference are exact.
//
//   x y = head(x) head(y) + head(x) rest(y) + rest(x) head(y) + rest(x) rest(y)
//
// The last product is below 2^-20 of the first and is left out; the tensor core cuts `rest` to tf32 by itself, which
// loses as little. The two small products go to an accumulator of their own: a tensor core truncates when it adds,
// and a long chain of additions to a large number would show it.

#pragma once

__device__ __forceinline__ float tf32_head(float x) {
    return __uint_as_float(__float_as_uint(x) & 0xffffe000u);
}

// D += A B for A [16 x 8] and B [8 x 8], spread over a warp as the instruction wants it (lane = 4 g + q):
// a = (row g, k q), (row g + 8, k q), (row g, k q + 4), (row g + 8, k q + 4);  b = (k q, column g), (k q + 4, column g);
// d = (row g, columns 2q, 2q + 1), (row g + 8, columns 2q, 2q + 1).
__device__ __forceinline__ float4 tf32_head(float4 x) {
    return make_float4(tf32_head(x.x), tf32_head(x.y), tf32_head(x.z), tf32_head(x.w));
}

// d (16 x 8) += a (16 x 8) b (8 x 8), in the fragments of PTX: of a, a lane has (g, q), (g + 8, q), (g, q + 4), (g + 8, q + 4).
__device__ __forceinline__ void multiply_add(float (&d)[4], float4 a, const float (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(__float_as_uint(a.x)), "r"(__float_as_uint(a.y)), "r"(__float_as_uint(a.z)),
          "r"(__float_as_uint(a.w)), "r"(__float_as_uint(b[0])), "r"(__float_as_uint(b[1])));
}
