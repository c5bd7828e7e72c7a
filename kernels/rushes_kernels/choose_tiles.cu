// The choice of the tiles with the largest scores, compiled by NVRTC.

typedef unsigned int u32;
typedef long long i64;

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int LOWEST = -2147483647 - 1;

// One warp a row of scores, which it keeps in registers as integers in the order of the floats. A threshold that k of
// them reach is found bit by bit from the highest on; as soon as exactly k reach it, the lower bits do not matter.
// Otherwise many are level with the last, and of those the lowest columns are taken.
template <int GROUPS>
__device__ __forceinline__ void choose(const float* scores, int* lists, i64 head_stride, i64 row_stride, int prefix,
                                       int columns, int k) {
    constexpr int CHUNK = 8;
    const int lane = threadIdx.x % 32, query = blockIdx.x * WARPS + threadIdx.x / 32;
    if (query >= columns) return;
    const float* row = scores + blockIdx.y * head_stride + (prefix + query) * row_stride + prefix;
    int* list = lists + ((i64)blockIdx.y * columns + query) * k;

    int key[GROUPS];
#pragma unroll
    for (int i = 0; i < GROUPS; i++) {
        const int column = 32 * i + lane;
        key[i] = LOWEST;
        if (column < columns) {
            float score = row[column];
            if (score != score) score = __uint_as_float(0xff800000u);  // NaN ranks with minus infinity
            if (score == 0) score = 0;                                 // zeros of both signs are equal
            const int bits = __float_as_int(score);
            key[i] = bits ^ (bits >> 31 & 0x7fffffff);
        }
    }

    // the first step leads from the lowest integer to 0
    int threshold = LOWEST, reached = 32 * GROUPS;
    for (u32 step = 0x80000000u; step && reached != k; step >>= 1) {
        const int candidate = (int)((u32)threshold + step);
        u32 count = 0;
#pragma unroll
        for (int chunk = 0; chunk < GROUPS; chunk += CHUNK)
            if (32 * chunk < columns)
#pragma unroll
                for (int i = 0; i < CHUNK; i++) count += key[chunk + i] >= candidate;
        for (int distance = 16; distance; distance /= 2) count += __shfl_xor_sync(~0u, count, distance);
        if ((int)count >= k) {
            threshold = candidate;
            reached = count;
        }
    }

    u32 above = 0;
#pragma unroll
    for (int i = 0; i < GROUPS; i++) above += key[i] > threshold;
    for (int distance = 16; distance; distance /= 2) above += __shfl_xor_sync(~0u, above, distance);
    int vacant = k - (int)above, written = 0;
    const u32 earlier = (1u << lane) - 1;
#pragma unroll
    for (int i = 0; i < GROUPS; i++) {
        if (32 * i >= columns) break;
        const u32 level = __ballot_sync(~0u, key[i] == threshold);
        const bool taken = key[i] > threshold || key[i] == threshold && __popc(level & earlier) < vacant;
        const u32 all_taken = __ballot_sync(~0u, taken);
        if (taken) list[written + __popc(all_taken & earlier)] = prefix + 32 * i + lane;
        written += __popc(all_taken);
        vacant -= min(vacant, __popc(level));
    }
}

#define CHOOSE(COLUMNS)                                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                           \
        choose_##COLUMNS(const float* __restrict__ scores, int* lists, i64 head_stride, i64 row_stride, int prefix, \
                         int columns, int k) {                                                                      \
        choose<COLUMNS / 32>(scores, lists, head_stride, row_stride, prefix, columns, k);                           \
    }
CHOOSE(1024)
CHOOSE(2048)
CHOOSE(4096)
