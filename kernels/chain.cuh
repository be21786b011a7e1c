// SPDX-License-Identifier: Apache-2.0
// Several tokens of one head at once: the parallel form of the delta rule. With d_j = exp(g_j) and D_ij the product of
// d_{i+1} to d_j, per key,
//
//   A[j,i] = sum_k k_j k_i D_ij  (i < j)                  B[j,i] = sum_k q_j k_i D_ij  (i <= j)
//   p_j = S0 (k_j D_0j)            r_j = S0 (q_j D_0j)    (D_0j: d_1 to d_j, the first token included)
//   u_j = beta_j (v_j - p_j - sum_{i<j} A[j,i] u_i)       o_j = r_j + sum_{i<=j} B[j,i] u_i
//
// The state is read once, whatever the number of tokens. D is built by multiplying, not as exp(G_j - G_i) from running
// sums: after one gate of -1e6 a sum has no digits left for the gates behind it, a product has them all. Factors are at most 1,
// so nothing overflows. Sums over i run over earlier tokens only: what a token gives never depends on a later one, not
// even on its NaN.
//
// A block of 8 warps holds a head. Warp w owns value rows 16 w to 16 w + 15 of S, K = V = 128; lane = 4 g + q owns keys
// 16 c + 4 q + (0..3), c = 0..7, of rows g and g + 8: 16 float4, loaded straight from memory, and the A operand of
// tensor-core products as they are. Numbering the keys this way in both operands costs nothing, since a sum over keys
// does not care about their order.
//
// Two thirds of a token's cost elsewhere is the serial chain of reductions; here it is 28 multiply-adds a row at 8 tokens.

#pragma once

constexpr int kK = 128, kV = 128, kWarps = 8, kThreads = 32 * kWarps;
constexpr int kOperandStride =
    kK + 16;  // 16 floats further each column: the eight lanes of a phase meet in no bank

// What the preparation leaves for the rest, in shared memory. kSides is 2 with queries (verify), 1 without (commit).
template <int kTokens, int kSides> struct Chain {
    float k[kTokens][kK];                             // activated, then normalised
    float q[kSides == 2 ? kTokens : 1][kK];           // likewise, times scale
    float v[kTokens][kV];                             // activated
    float decay[kTokens][kK];                         // d_j
    float growth[kTokens][kK];                        // D_0j
    float operand[kSides * kTokens][kOperandStride];  // k_j D_0j, then q_j D_0j
    float products[kV][kSides * kTokens + 4];  // p_j, then r_j; four further each row, to meet in no bank
    float A[kTokens][kTokens], B[kSides == 2 ? kTokens : 1][kTokens];
    float beta[kTokens];
};

struct HeadState {
    float4 rows[2][8];  // [row g or g + 8][c]
};

__device__ __forceinline__ const float* lane_row(const float* head, int half) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    return head + (16 * warp + g + 8 * half) * kK + 4 * q;
}

__device__ __forceinline__ void load_state(HeadState& S, const float* head) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int c = 0; c < 8; ++c) S.rows[half][c] = load_streaming(lane_row(head, half) + 16 * c);
}

__device__ __forceinline__ void store_state(float* head, const HeadState& S) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int c = 0; c < 8; ++c)
            store_streaming(const_cast<float*>(lane_row(head, half)) + 16 * c, S.rows[half][c]);
}

__device__ __forceinline__ float4 load_shared(const float* from) {
    return *reinterpret_cast<const float4*>(from);
}
__device__ __forceinline__ float dot4(float4 x, float4 y) {
    return fmaf(x.x, y.x, fmaf(x.y, y.y, fmaf(x.z, y.z, x.w * y.w)));
}
__device__ __forceinline__ float4 operator*(float4 x, float4 y) {
    return make_float4(x.x * y.x, x.y * y.y, x.z * y.z, x.w * y.w);
}
__device__ __forceinline__ float4 operator*(float4 x, float y) {
    return make_float4(x.x * y, x.y * y, x.z * y, x.w * y);
}

// L2 norms (where wanted) and the operand of the products; a warp a token, a lane four keys. After a barrier behind the loads.
template <int kTokens, int kSides>
__device__ __forceinline__ void normalize(Chain<kTokens, kSides>& chain, bool wanted, float scale) {
    const int key = 4 * (threadIdx.x % 32);
    for (int j = threadIdx.x / 32; j < kTokens; j += kWarps) {
        const float4 growth = load_shared(&chain.growth[j][key]);
        float4 k = load_shared(&chain.k[j][key]);
        k = k * (wanted ? rsqrtf(sum_lanes<32>(dot4(k, k)) + 1e-6f) : 1.0f);
        *reinterpret_cast<float4*>(&chain.k[j][key]) = k;
        *reinterpret_cast<float4*>(&chain.operand[j][key]) = k * growth;
        if constexpr (kSides == 2) {
            float4 q = load_shared(&chain.q[j][key]);
            q = q * ((wanted ? rsqrtf(sum_lanes<32>(dot4(q, q)) + 1e-6f) : 1.0f) * scale);
            *reinterpret_cast<float4*>(&chain.q[j][key]) = q;
            *reinterpret_cast<float4*>(&chain.operand[kTokens + j][key]) = q * growth;
        }
    }
}

// A and B. A warp takes a column i and walks down it, a lane four keys: k_i D_ij costs one product a token. With 16 tokens
// it takes a long column and a short one. After a barrier behind normalize.
template <int kTokens, int kSides>
__device__ __forceinline__ void coefficients(Chain<kTokens, kSides>& chain, int tokens) {
    constexpr int kBatch = 8;  // tokens whose sums are taken together
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, key = 4 * lane;
#pragma unroll 1
    for (int pass = 0; pass < kTokens / kWarps; ++pass) {
        const int i = pass == 0 ? warp : 2 * kWarps - 1 - warp;
        if (i >= tokens) continue;
        float4 decayed = load_shared(&chain.k[i][key]);
#pragma unroll 1
        for (int first = i; first < tokens; first += kBatch) {
            float sums[2 * kBatch];
#pragma unroll
            for (int n = 0; n < kBatch; ++n) {
                const int j = first + n;
                sums[2 * n] = sums[2 * n + 1] = 0.0f;
                if (j < tokens) {
                    if (j > i) decayed = decayed * load_shared(&chain.decay[j][key]);
                    sums[2 * n] = dot4(load_shared(&chain.k[j][key]), decayed);
                    if constexpr (kSides == 2) sums[2 * n + 1] = dot4(load_shared(&chain.q[j][key]), decayed);
                }
            }
            const float sum = sum_lanes_each<32>(sums, lane);  // of value lane / 2: token lane / 4, k or q
            const int j = first + lane / 4;
            if (j < tokens && lane % 2 == 0) {
                if (lane / 2 % 2 == 0)
                    chain.A[j][i] = sum;
                else if (kSides == 2)
                    chain.B[j][i] = sum;
            }
        }
    }
}

// p and r of this warp's 16 rows, into chain.products.
template <int kTokens, int kSides>
__device__ __forceinline__ void multiply(Chain<kTokens, kSides>& chain, const HeadState& S) {
    constexpr int kColumns = kSides * kTokens, kBlocks = kColumns / 8;
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    float large[kBlocks][4] = {}, small[2][kBlocks][4] = {};
#pragma unroll
    for (int c = 0; c < 8; ++c) {
        const float upper[4] = {S.rows[0][c].x, S.rows[0][c].y, S.rows[0][c].z, S.rows[0][c].w};
        const float lower[4] = {S.rows[1][c].x, S.rows[1][c].y, S.rows[1][c].z, S.rows[1][c].w};
        float a_head[2][4], a_rest[2][4];
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            const float a[4] = {upper[2 * s], lower[2 * s], upper[2 * s + 1], lower[2 * s + 1]};
#pragma unroll
            for (int i = 0; i < 4; ++i) a_head[s][i] = tf32_head(a[i]), a_rest[s][i] = a[i] - a_head[s][i];
        }
#pragma unroll
        for (int n = 0; n < kBlocks; ++n) {
            const float4 x = load_shared(&chain.operand[8 * n + g][16 * c + 4 * q]);
            const float b[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int s = 0; s < 2; ++s) {
                const float head[2] = {tf32_head(b[2 * s]), tf32_head(b[2 * s + 1])};
                const float rest[2] = {b[2 * s] - head[0], b[2 * s + 1] - head[1]};
                multiply_add(large[n], a_head[s], head);
                multiply_add(small[0][n], a_head[s], rest);
                multiply_add(small[1][n], a_rest[s], head);
            }
        }
    }
#pragma unroll
    for (int n = 0; n < kBlocks; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            chain.products[16 * warp + g + 8 * (i / 2)][8 * n + 2 * q + i % 2] =
                large[n][i] + (small[0][n][i] + small[1][n][i]);
}

// Four numbers at a time of a row in shared memory.
template <int kCount> __device__ __forceinline__ void load_row(const float* from, float (&to)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
        const float4 x = load_shared(from + i);
        to[i] = x.x, to[i + 1] = x.y, to[i + 2] = x.z, to[i + 3] = x.w;
    }
}

// u of value row 16 warp + lane % 16, for every token. After a barrier behind coefficients and multiply.
template <int kTokens, int kSides>
__device__ __forceinline__ void substitute(const Chain<kTokens, kSides>& chain, int tokens,
                                           float (&u)[kTokens]) {
    const int row = 16 * (threadIdx.x / 32) + threadIdx.x % 16;
    float p[kTokens], A[kTokens];
    load_row(chain.products[row], p);
#pragma unroll
    for (int j = 0; j < kTokens; ++j) {
        u[j] = 0.0f;
        if (j < tokens) {
            load_row(chain.A[j], A);
            float left = chain.v[j][row] - p[j];
#pragma unroll
            for (int i = 0; i < j; ++i) left = fmaf(-A[i], u[i], left);
            u[j] = chain.beta[j] * left;
        }
    }
}

// o of the same row and token j.
template <int kTokens>
__device__ __forceinline__ float output(const Chain<kTokens, 2>& chain, int j, const float (&u)[kTokens]) {
    const int row = 16 * (threadIdx.x / 32) + threadIdx.x % 16;
    float B[kTokens], o = chain.products[row][kTokens + j];
    load_row(chain.B[j], B);
#pragma unroll
    for (int i = 0; i < kTokens; ++i)
        if (i <= j) o = fmaf(B[i], u[i], o);
    return o;
}

// Puts u where p was: the loop over tokens that follows may then stay a loop, and code that runs once is paid for by
// its length. A warp reads back only what it wrote.
template <int kTokens, int kSides>
__device__ __forceinline__ void keep_corrections(Chain<kTokens, kSides>& chain, const float (&u)[kTokens]) {
    const int lane = threadIdx.x % 32, row = 16 * (threadIdx.x / 32) + lane;
    __syncwarp();
    if (lane < 16) {
#pragma unroll
        for (int j = 0; j < kTokens; ++j) chain.products[row][j] = u[j];
    }
    __syncwarp();
}

// S <- S exp(g_j) + u_j k_j^T. After keep_corrections.
template <int kTokens, int kSides>
__device__ __forceinline__ void advance(HeadState& S, const Chain<kTokens, kSides>& chain, int j) {
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4, row = 16 * (threadIdx.x / 32) + g;
    const float u[2] = {chain.products[row][j], chain.products[row + 8][j]};
#pragma unroll
    for (int c = 0; c < 8; ++c) {
        const float4 decay = load_shared(&chain.decay[j][16 * c + 4 * q]),
                     k = load_shared(&chain.k[j][16 * c + 4 * q]);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float4& x = S.rows[half][c];
            x.x = fmaf(u[half], k.x, x.x * decay.x);
            x.y = fmaf(u[half], k.y, x.y * decay.y);
            x.z = fmaf(u[half], k.z, x.z * decay.z);
            x.w = fmaf(u[half], k.w, x.w * decay.w);
        }
    }
}
