// Rows to e4m3 with a factor each, compiled by NVRTC behind words.cuh for one width and one element type.
//
// Macros: COLUMNS of a row; X type of its elements.

constexpr int N = X == 2 ? 4 : 8;
constexpr int GROUPS = COLUMNS / N;
constexpr int THREADS = 256;
constexpr int PER_THREAD = (GROUPS + THREADS - 1) / THREADS;
constexpr float LARGEST = 448.f, LEAST = 1e-30f;

// two floats as e4m3, the first in the lower byte
__device__ __forceinline__ u32 narrow_bytes(float low, float high) {
    unsigned short pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}

// A block takes one row after the other. values: (rows, COLUMNS) bytes, scales: (rows).
extern "C" __global__ void __launch_bounds__(THREADS)
    quantise_rows(const void* x, u32* values, float* scales, int rows) {
    __shared__ float partial[2][THREADS / 32];
    int turn = 0;
    for (int row = blockIdx.x; row < rows; row += gridDim.x) {
        Words<X, N> kept[PER_THREAD];
        float most = LEAST;
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) {
            const int group = THREADS * i + threadIdx.x;
            if (group < GROUPS) kept[i].load_once(x, (i64)row * GROUPS + group);
        }
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) {
            if (THREADS * i + threadIdx.x < GROUPS) {
                float a[N];
                kept[i].get(a);
#pragma unroll
                for (int j = 0; j < N; j++) most = fmaxf(most, fabsf(a[j]));
            }
        }
        for (int apart = 16; apart; apart /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, apart));
        turn ^= 1;
        if (threadIdx.x % 32 == 0) partial[turn][threadIdx.x / 32] = most;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < THREADS / 32; i++) most = fmaxf(most, partial[turn][i]);
        const float inverse = 1.f / most * LARGEST;
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) {
            const int group = THREADS * i + threadIdx.x;
            if (group < GROUPS) {
                float a[N];
                kept[i].get(a);
                u32 word[N / 4];
#pragma unroll
                for (int j = 0; j < N / 4; j++)
                    word[j] = narrow_bytes(a[4 * j] * inverse, a[4 * j + 1] * inverse) |
                              narrow_bytes(a[4 * j + 2] * inverse, a[4 * j + 3] * inverse) << 16;
                u32* at = values + ((i64)row * GROUPS + group) * (N / 4);
                if constexpr (N == 8)
                    *(uint2*)at = make_uint2(word[0], word[1]);
                else
                    *at = word[0];
            }
        }
        if (threadIdx.x == 0) scales[row] = most * (1.f / LARGEST);
    }
}
