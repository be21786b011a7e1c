// SPDX-License-Identifier: Apache-2.0
// Up to eight tokens of one head at once: the parallel form of the delta rule. With d_j = exp(g_j) and D_ij the product
// of d_{i+1} to d_j, per key,
//
//   A[j,i] = sum_k k_j k_i D_ij  (i < j)                  B[j,i] = sum_k q_j k_i D_ij  (i <= j)
//   p_j = S0 (k_j D_0j)            r_j = S0 (q_j D_0j)    (D_0j: d_1 to d_j, the first token included)
//   u_j = beta_j (v_j - p_j - sum_{i<j} A[j,i] u_i)       o_j = r_j + sum_{i<=j} B[j,i] u_i
//   S_n = S0 D_0n + sum_i u_i (k_i D_in)^T
//
// The state is read once, whatever the number of tokens. D is built by multiplying, not as exp(G_j - G_i) from running
// sums: after one gate of -1e6 a sum has no digits left for the gates behind it, a product has them all. Factors are at
// most 1, so nothing overflows. Sums over i run over earlier tokens only: what a token gives never depends on a later
// one, not even on its NaN. Longer chains are worked eight tokens after eight, the state advanced in between.
//
// A block of 8 warps holds a head. Warp w owns value rows 16 w to 16 w + 15 of S, K = V = 128; lane = 4 g + q owns keys
// 16 c + 4 q + (0..3), c = 0..7, of rows g and g + 8: 16 float4, loaded straight from memory. Pairs of them are the B
// operand of tensor-core products as they are; the A operand, k_j D_0j and q_j D_0j of eight tokens, is put into shared
// memory in the order in which a lane wants it. Numbering the keys this way in both operands costs nothing, since a sum
// over keys does not care about their order.
//
// A product leaves p and r of token g in the lane, for rows 2 q and 2 q + 1 of each eight: the eight lanes of a row solve
// its triangle by shuffles alone.
//
// A block is eight warps of some 1,500 instructions: 3,000 issue cycles of an SM of an H200, for a head whose bytes take
// 5,000 (100 KiB at eight tokens, conv windows included).

#pragma once

constexpr int kK = 128, kV = 128, kWarps = 8, kThreads = 32 * kWarps;
// Blocks that an SM is to hold: two, of 128 registers a thread. For newer GPUs the compiler would spill a few at that.
#if __CUDA_ARCH__ < 1000
constexpr int kBlocks = 2;
#else
constexpr int kBlocks = 1;
#endif
constexpr int kChunk = 8;  // tokens worked at once: a warp a token, sixteen rows of A operand

// 32 lanes of four floats a step of eight keys; 8 floats further each step: the eight lanes of a phase meet in no bank.
constexpr int kSteps = kK / 8, kStepStride = 128 + 8;

// A and B are products too, D_ij = D_0j / D_0i, unless a key forgets more than this in eight tokens: then the quotient
// has lost its digits and the coefficients are summed pair by pair. A lower bound of -5 stays above it (2^-58).
constexpr float kSteep = 8.271806e-25f;  // 2^-80
constexpr int kParts = 4;                // warps that share the product, four steps each

// What the preparation leaves for the rest, in shared memory.
struct Chain {
    float k[kChunk][kK];                             // activated and normalised
    float q[kChunk][kK];                             // likewise, times scale
    float v[kChunk][kV];                             // activated
    float decay[kChunk][kK];                         // d_j
    float growth[kChunk][kK];                        // D_0j
    float heads[kSteps][kStepStride];                // of k_j D_0j and q_j D_0j: what tf32 holds of them
    float rests[kSteps][kStepStride];                // and what it does not
    float inverses[kSteps][kStepStride];             // of k_j / D_0j: both
    float coefficients[kParts][2 * kChunk][kChunk];  // A, then B, as sums of parts
    float beta[kChunk];
};

struct HeadState {
    float4 rows[2][8];  // [row g or g + 8][c]
};

// A number of token g for each of a lane's four rows: [rows 0 to 7 or 8 to 15][row 2 q or 2 q + 1].
struct LaneRows {
    float of[2][2];
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
__device__ __forceinline__ void store_shared(float* to, float4 x) { *reinterpret_cast<float4*>(to) = x; }
__device__ __forceinline__ float dot4(float4 x, float4 y) {
    return fmaf(x.x, y.x, fmaf(x.y, y.y, fmaf(x.z, y.z, x.w * y.w)));
}
__device__ __forceinline__ float4 operator*(float4 x, float4 y) {
    return make_float4(x.x * y.x, x.y * y.y, x.z * y.z, x.w * y.w);
}
__device__ __forceinline__ float4 operator*(float4 x, float y) {
    return make_float4(x.x * y, x.y * y, x.z * y, x.w * y);
}
__device__ __forceinline__ float4 operator+(float4 x, float4 y) {
    return make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
}
__device__ __forceinline__ float4 operator-(float4 x, float4 y) {
    return make_float4(x.x - y.x, x.y - y.y, x.z - y.z, x.w - y.w);
}

__device__ __forceinline__ float4 unit(float4 x) { return x * rsqrtf(sum_lanes<32>(dot4(x, x)) + 1e-6f); }

__device__ __forceinline__ float4 inverse(float4 x) {
    return make_float4(__fdividef(1.0f, x.x), __fdividef(1.0f, x.y), __fdividef(1.0f, x.z),
                       __fdividef(1.0f, x.w));
}

// k and q of token j, four keys a lane (key = 4 lane), into the operands. Returns k_j / D_0j.
__device__ __forceinline__ float4 place(Chain& chain, int j, float4 k, float4 q) {
    const int lane = threadIdx.x % 32, step = 2 * (lane / 4), at = 4 * (4 * j + lane % 4);
    const float4 growth = load_shared(&chain.growth[j][4 * lane]);
    store_shared(&chain.k[j][4 * lane], k);
    store_shared(&chain.q[j][4 * lane], q);
    const float4 i = k * inverse(growth), i_head = tf32_head(i), i_rest = i - i_head;
    k = k * growth, q = q * growth;
    const float4 k_head = tf32_head(k), q_head = tf32_head(q), k_rest = k - k_head, q_rest = q - q_head;
    store_shared(&chain.heads[step][at], make_float4(k_head.x, q_head.x, k_head.y, q_head.y));
    store_shared(&chain.heads[step + 1][at], make_float4(k_head.z, q_head.z, k_head.w, q_head.w));
    store_shared(&chain.rests[step][at], make_float4(k_rest.x, q_rest.x, k_rest.y, q_rest.y));
    store_shared(&chain.rests[step + 1][at], make_float4(k_rest.z, q_rest.z, k_rest.w, q_rest.w));
    store_shared(&chain.inverses[step][at], make_float4(i_head.x, i_head.y, i_rest.x, i_rest.y));
    store_shared(&chain.inverses[step + 1][at], make_float4(i_head.z, i_head.w, i_rest.z, i_rest.w));
    return i;
}

// Rows of A and B of tokens before `steep` as a product, a part of the keys for each of the first warps. After a barrier
// behind `place`.
__device__ __forceinline__ void multiply_coefficients(Chain& chain, int steep) {
    const int part = threadIdx.x / 32, at = 4 * (threadIdx.x % 32), g = at / 16, q = threadIdx.x % 4;
    if (part >= kParts) return;
    float large[4] = {}, small[2][4] = {};
#pragma unroll
    for (int n = 0; n < kSteps / kParts; ++n) {
        const int step = part * (kSteps / kParts) + n;
        const float4 head = load_shared(&chain.heads[step][at]), rest = load_shared(&chain.rests[step][at]),
                     i = load_shared(&chain.inverses[step][at]);
        multiply_add(large, head, {i.x, i.y});
        multiply_add(small[0], rest, {i.x, i.y});
        multiply_add(small[1], head, {i.z, i.w});
    }
    if (g >= steep) return;
#pragma unroll
    for (int side = 0; side < 2; ++side)
        *reinterpret_cast<float2*>(&chain.coefficients[part][g + kChunk * side][2 * q]) =
            make_float2(large[2 * side] + (small[0][2 * side] + small[1][2 * side]),
                        large[2 * side + 1] + (small[0][2 * side + 1] + small[1][2 * side + 1]));
}

// Those of tokens from `steep` on pair by pair: a column i a warp, which walks down the tokens, a lane four keys. Returns
// k_i D_in, n the last token.
__device__ __forceinline__ float4 sum_coefficients(Chain& chain, int steep, int tokens) {
    const int lane = threadIdx.x % 32, i = threadIdx.x / 32, key = 4 * lane;
    if (i >= tokens) return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float4 decayed = load_shared(&chain.k[i][key]);
#pragma unroll 1
    for (int j = i; j < tokens; ++j) {
        if (j > i) decayed = decayed * load_shared(&chain.decay[j][key]);
        if (j < steep) continue;  // an earlier token does not see that a later one is steep
        const float a = sum_lanes<32>(dot4(load_shared(&chain.k[j][key]), decayed));
        const float b = sum_lanes<32>(dot4(load_shared(&chain.q[j][key]), decayed));
        if (lane < kParts) {
            chain.coefficients[lane][j][i] = lane == 0 ? a : 0.0f;
            chain.coefficients[lane][kChunk + j][i] = lane == 0 ? b : 0.0f;
        }
    }
    return decayed;
}

// p and r of this warp's rows.
__device__ __forceinline__ void project(const Chain& chain, const HeadState& S, LaneRows& p, LaneRows& r) {
    const int at = 4 * (threadIdx.x % 32);
    float large[2][4] = {}, small[2][2][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        const float4 head = load_shared(&chain.heads[step][at]), rest = load_shared(&chain.rests[step][at]);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float4 s = S.rows[half][step / 2];
            const float b[2] = {step % 2 ? s.z : s.x, step % 2 ? s.w : s.y};
            const float b_head[2] = {tf32_head(b[0]), tf32_head(b[1])};
            const float b_rest[2] = {b[0] - b_head[0], b[1] - b_head[1]};
            multiply_add(large[half], head, b_head);
            multiply_add(small[half][0], rest, b_head);
            multiply_add(small[half][1], head, b_rest);
        }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            p.of[half][n] = large[half][n] + (small[half][0][n] + small[half][1][n]);
            r.of[half][n] = large[half][n + 2] + (small[half][0][n + 2] + small[half][1][n + 2]);
        }
}

// A row of A or B.
__device__ __forceinline__ void load_coefficients(const Chain& chain, int row, float (&to)[kChunk]) {
#pragma unroll
    for (int i = 0; i < kChunk; i += 4) {
        float4 x[kParts];
#pragma unroll
        for (int part = 0; part < kParts; ++part) x[part] = load_shared(&chain.coefficients[part][row][i]);
        const float4 sum = (x[0] + x[1]) + (x[2] + x[3]);
        to[i] = sum.x, to[i + 1] = sum.y, to[i + 2] = sum.z, to[i + 3] = sum.w;
    }
}

// p becomes u, r becomes o, in the lanes of live tokens; the others are left with anything. After a barrier behind the
// coefficients.
template <bool kQueries>
__device__ __forceinline__ void substitute(const Chain& chain, int tokens, LaneRows& p, LaneRows& r) {
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4, row = 16 * (threadIdx.x / 32) + 2 * q;
    const float beta = chain.beta[g];
    float A[kChunk], B[kChunk];
    load_coefficients(chain, g, A);
    if constexpr (kQueries) load_coefficients(chain, kChunk + g, B);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float2 v = *reinterpret_cast<const float2*>(&chain.v[g][row + 8 * half]);
        p.of[half][0] = beta * (v.x - p.of[half][0]), p.of[half][1] = beta * (v.y - p.of[half][1]);
    }
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
        if (i % 4 == 0 && i >= tokens) break;  // what comes from beyond the last token goes beyond it
        A[i] *= -beta;
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const float u_i = __shfl_sync(kAllLanes, p.of[half][n], 4 * i + q);
                if (g > i) p.of[half][n] = fmaf(A[i], u_i, p.of[half][n]);
                if (kQueries && g >= i) r.of[half][n] = fmaf(B[i], u_i, r.of[half][n]);
            }
    }
}

// u of one token for rows g and g + 8.
__device__ __forceinline__ float2 of_rows(const LaneRows& u, int token) {
    const int g = threadIdx.x % 32 / 4, from = 4 * token + g / 2;
    float2 x;
    const float x0 = __shfl_sync(kAllLanes, u.of[0][0], from), x1 = __shfl_sync(kAllLanes, u.of[0][1], from);
    const float y0 = __shfl_sync(kAllLanes, u.of[1][0], from), y1 = __shfl_sync(kAllLanes, u.of[1][1], from);
    x.x = g % 2 ? x1 : x0, x.y = g % 2 ? y1 : y0;
    return x;
}

// S <- S exp(g_j) + u_j k_j^T, one token of the chain.
__device__ __forceinline__ void advance(HeadState& S, const Chain& chain, const LaneRows& u, int j) {
    const int q = threadIdx.x % 4;
    const float2 rows = of_rows(u, j);
    const float u_j[2] = {rows.x, rows.y};
#pragma unroll
    for (int c = 0; c < 8; ++c) {
        const float4 decay = load_shared(&chain.decay[j][16 * c + 4 * q]),
                     k = load_shared(&chain.k[j][16 * c + 4 * q]);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float4& x = S.rows[half][c];
            x.x = fmaf(u_j[half], k.x, x.x * decay.x);
            x.y = fmaf(u_j[half], k.y, x.y * decay.y);
            x.z = fmaf(u_j[half], k.z, x.z * decay.z);
            x.w = fmaf(u_j[half], k.w, x.w * decay.w);
        }
    }
}
