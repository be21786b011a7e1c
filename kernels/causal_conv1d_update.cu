// SPDX-License-Identifier: Apache-2.0
// The causal convolution alone: t tokens of every row, history rolled in place, or (with windows) only read and the window
// after each token written beside it. The formula is in kernels/conv.cuh, the same code as in the fused step: same bits.
//
// Who owns what. A thread is one channel of one row and walks its tokens; it alone reads and writes that channel's
// history, so nothing races. Channels come in one piece or in three (q, k, v, each with strides of its own) and leave
// side by side in one row of `out`, as the packed decodes take them. Blocks are cut so that none spans two pieces.
//
// Bytes, a channel and row: t in, t out, width - 1 of history read and as many written. Far from any floor that matters:
// at t = 1 a launch is longer than its traffic.
//
// A slot <= null_index is padding: nothing but its row of `out` is touched, which is zero. A slot or a window row out of
// range likewise, and it is recorded.

#include "memory.cuh"
#include "conv.cuh"
#include "guard.cuh"

// Mirrors ConvPointers and ConvLayout in kda_cupy/ops/conv_params.py, field by field; arrays of three are the pieces.
struct ConvUpdateParams {
    const KDA_ACTIVATION* x[3];
    const KDA_CONV_WEIGHT* w[3];
    const KDA_CONV_WEIGHT* bias[3];
    KDA_ACTIVATION* cs[3];
    KDA_ACTIVATION* windows[3];
    const void* conv_state_indices;
    const void* intermediate_state_indices;
    KDA_ACTIVATION* out;
    ErrorRecord* errors;
    long long first_row;  // of this launch: the z axis of a grid stops at 65,535 blocks, a batch need not
    long long x_stride[3], x_channel_stride[3], x_token_stride[3];
    long long w_stride[3], w_tap_stride[3], bias_stride[3];
    long long cs_slot_stride[3], cs_channel_stride[3], cs_tap_stride[3];
    long long window_row_stride[3], window_step_stride[3], window_channel_stride[3], window_tap_stride[3];
    long long channels[3], blocks[3];  // of each piece; 0 for one that is not there
    long long out_stride, out_channel_stride, out_token_stride, slot_index_stride, scratch_index_stride,
        slots, scratch_rows, tokens;
    int null_index, slot_index_is_64bit, scratch_index_is_64bit, operation;
};

namespace {

constexpr int kWidth = KDA_WIDTH, kThreads = KDA_THREADS;
constexpr bool kSilu = KDA_SILU;

static_assert(sizeof(ConvUpdateParams) == KDA_PARAMS_BYTES, "host and device disagree about the parameters");

enum { kSlotOperand = 7, kScratchOperand = 2 };  // numbers in OPERANDS of kda_cupy/guard.py

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    causal_conv1d_update(const __grid_constant__ ConvUpdateParams params) {
    // Grid (blocks of all pieces, 1, rows of this launch).
    const long long row = params.first_row + blockIdx.z;
    int piece = 0;
    long long block = blockIdx.x, before = 0;
    while (block >= params.blocks[piece]) block -= params.blocks[piece], before += params.channels[piece++];
    const long long channel = block * kThreads + threadIdx.x;
    if (channel >= params.channels[piece]) return;

    const long long slot = params.conv_state_indices
                               ? load_index(params.conv_state_indices, params.slot_index_is_64bit,
                                            row * params.slot_index_stride)
                               : row;
    const bool keeps_windows = params.windows[0];
    const long long scratch =
        keeps_windows ? load_index(params.intermediate_state_indices, params.scratch_index_is_64bit,
                                   row * params.scratch_index_stride)
                      : 0;
    KDA_ACTIVATION* out =
        params.out + row * params.out_stride + (before + channel) * params.out_channel_stride;

    const bool padding = slot <= params.null_index, bad_slot = slot >= params.slots;
    const bool bad_scratch = keeps_windows && (scratch < 0 || scratch >= params.scratch_rows);
    if (padding || bad_slot || bad_scratch) {
        if (!padding && blockIdx.x == 0 && threadIdx.x == 0) {
            if (bad_slot)
                record_error(params.errors, params.operation, kSlotOperand, row, slot, params.slots);
            else
                record_error(params.errors, params.operation, kScratchOperand, row, scratch,
                             params.scratch_rows);
        }
        for (long long j = 0; j < params.tokens; ++j, out += params.out_token_stride)
            *out = from_float<KDA_ACTIVATION>(0.0f);
        return;
    }

    const KDA_ACTIVATION* x =
        params.x[piece] + row * params.x_stride[piece] + channel * params.x_channel_stride[piece];
    KDA_ACTIVATION* const history =
        params.cs[piece] + slot * params.cs_slot_stride[piece] + channel * params.cs_channel_stride[piece];
    KDA_ACTIVATION next = {}, raw[kWidth];
    if (params.tokens > 0) next = *x;
    float w[kWidth], window[kWidth];
#pragma unroll
    for (int tap = 0; tap < kWidth - 1; ++tap) raw[tap] = history[tap * params.cs_tap_stride[piece]];
#pragma unroll
    for (int tap = 0; tap < kWidth; ++tap)
        w[tap] =
            to_float(params.w[piece][channel * params.w_stride[piece] + tap * params.w_tap_stride[piece]]);
    const float bias =
        params.bias[piece] ? to_float(params.bias[piece][channel * params.bias_stride[piece]]) : 0.0f;
    KDA_ACTIVATION* kept = keeps_windows ? params.windows[piece] + scratch * params.window_row_stride[piece] +
                                               channel * params.window_channel_stride[piece]
                                         : nullptr;
#pragma unroll 1
    for (long long j = 0; j < params.tokens; ++j) {
        raw[kWidth - 1] = next;
        x += params.x_token_stride[piece];
        if (j + 1 < params.tokens) next = *x;  // one ahead: nothing that is written below is read here
#pragma unroll
        for (int tap = 0; tap < kWidth; ++tap) window[tap] = to_float(raw[tap]);
        const float y = convolve(w, bias, window);
        *out = from_float<KDA_ACTIVATION>(kSilu ? silu(y) : y);
        out += params.out_token_stride;
#pragma unroll
        for (int tap = 0; tap < kWidth - 1; ++tap) {
            raw[tap] = raw[tap + 1];
            if (keeps_windows) kept[tap * params.window_tap_stride[piece]] = raw[tap];
        }
        if (keeps_windows) kept += params.window_step_stride[piece];
    }
    if (keeps_windows) return;
#pragma unroll
    for (int tap = 0; tap < kWidth - 1; ++tap) history[tap * params.cs_tap_stride[piece]] = raw[tap];
}
