// SPDX-License-Identifier: Apache-2.0
// What a kernel does with an index it must not follow: it treats the row as padding and leaves a note, which
// the host turns into an exception at the next synchronising call. Mirrors kda_cupy/guard.py.

#pragma once

struct ErrorRecord {
    unsigned long long count;  // rows refused since the host last looked
    unsigned claimed;          // 0 until the first of them took the fields below
    int operation;
    int operand;
    int reserved;
    long long row, value, limit;
};

__device__ inline void record_error(ErrorRecord* record, int operation, int operand, long long row,
                                    long long value, long long limit) {
    atomicAdd(&record->count, 1ull);
    if (atomicCAS(&record->claimed, 0u, 1u) == 0u) {
        record->operation = operation;
        record->operand = operand;
        record->row = row;
        record->value = value;
        record->limit = limit;
    }
}

// Element i of an index vector of either width. Without a branch, so that several are on their way at once; `volatile`
// keeps the load where it is written: everything waits for it. What is done with its words waits for them, so whoever
// looks ahead keeps the words.
struct IndexWords {
    int low, high;
};

__device__ __forceinline__ IndexWords load_index_words(const void* indices, bool is_64bit, long long i) {
    const char* const at = static_cast<const char*>(indices) + (i << (is_64bit ? 3 : 2));
    IndexWords words;
    asm volatile(
        "{ .reg .pred wide; setp.ne.s32 wide, %3, 0; mov.b32 %1, 0;"
        "  ld.global.b32 %0, [%2]; @wide ld.global.b32 %1, [%2 + 4]; }"
        : "=r"(words.low), "=&r"(words.high)
        : "l"(at), "r"(int(is_64bit)));
    return words;
}

__device__ __forceinline__ long long to_index(IndexWords words, bool is_64bit) {
    return static_cast<long long>(is_64bit ? words.high : words.low >> 31) << 32 |
           static_cast<unsigned>(words.low);
}

__device__ __forceinline__ long long load_index(const void* indices, bool is_64bit, long long i) {
    return to_index(load_index_words(indices, is_64bit, i), is_64bit);
}

// The same in two halves, for a kernel that has other loads to issue in between: whoever widens the index waits for it.
struct LoadedIndex {
    unsigned low, high;  // of 32 bits: low alone
};

__device__ __forceinline__ LoadedIndex start_index(const void* indices, int is_64bit, long long i) {
    const unsigned* const word = static_cast<const unsigned*>(indices) + (i << is_64bit);
    LoadedIndex index;
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(index.low) : "l"(word));
    if (is_64bit) asm volatile("ld.global.b32 %0, [%1 + 4];" : "=r"(index.high) : "l"(word));
    return index;
}

__device__ __forceinline__ long long finish_index(LoadedIndex index, int is_64bit) {
    const int high = is_64bit ? static_cast<int>(index.high) : static_cast<int>(index.low) >> 31;
    return static_cast<long long>(high) << 32 | index.low;
}
