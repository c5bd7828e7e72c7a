// Factors of matrix products that are to be as exact as fp32 and as fast as bf16, compiled by NVRTC: x = a + b + c, each
// bf16 the nearest to what the ones before leave over.

typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

constexpr int THREADS = 256, WARPS = THREADS / 32, MAX_COPIES = 6, N = 8;
constexpr float LOWEST = -1e30f;  // finite, so that a difference of two of them is 0 and not NaN

// the bf16 nearest to x, and what it leaves over
__device__ __forceinline__ u32 take(float& x) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    x -= __uint_as_float((u32)bits << 16);
    return bits;
}

// x: (heads, rows, columns) fp32, times `scale`. Copy j of every row holds its part parts[j] and lies copy_stride
// elements behind copy j - 1; rows past the last become 0. Four columns a thread.
struct Copies {
    int count, parts[MAX_COPIES];
    i64 stride, row_stride, head_stride;
};
extern "C" __global__ void __launch_bounds__(THREADS)
    split(const float* x, u16* copies, int rows, int padded_rows, int columns, float scale,
          const __grid_constant__ Copies layout) {
    const int at = (blockIdx.x * THREADS + threadIdx.x) * 4, row = at / columns, column = at % columns;
    if (row >= padded_rows) return;
    float4 value = make_float4(0, 0, 0, 0);
    if (row < rows) value = __ldcs((const float4*)(x + ((i64)blockIdx.y * rows + row) * columns + column));
    float left[4] = {value.x * scale, value.y * scale, value.z * scale, value.w * scale};
    uint2 part[3];
#pragma unroll
    for (int i = 0; i < 3; i++) {
        part[i].x = take(left[0]);
        part[i].x |= take(left[1]) << 16;
        part[i].y = take(left[2]);
        part[i].y |= take(left[3]) << 16;
    }
    u16* to = copies + blockIdx.y * layout.head_stride + row * layout.row_stride + column;
#pragma unroll
    for (int j = 0; j < MAX_COPIES; j++)
        if (j < layout.count) {
            const int i = layout.parts[j];
            *(uint2*)(to + j * layout.stride) = i == 0 ? part[0] : i == 1 ? part[1] : part[2];
        }
}

// Softmax over the first `columns` of every row of `padded` scores, in parts: a row of weights is a, b and a again,
// `padded` elements each; columns past the last become 0. One warp a row.
extern "C" __global__ void __launch_bounds__(THREADS)
    weigh(const float* scores, u16* weights, i64 rows, int columns, int padded) {
    const i64 row = (i64)blockIdx.x * WARPS + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    if (row >= rows) return;
    const float* from = scores + row * padded;
    u16* to = weights + row * padded * 3;
    float high = LOWEST, sum = 0;
    const auto load = [&](float (&x)[N], int column) {
        const float4 low = *(const float4*)(from + column), top = *(const float4*)(from + column + 4);
        x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
        x[4] = top.x, x[5] = top.y, x[6] = top.z, x[7] = top.w;
#pragma unroll
        for (int i = 0; i < N; i++)
            if (column + i >= columns) x[i] = __uint_as_float(0xff800000u);
    };
    for (int column = lane * N; column < padded; column += 32 * N) {
        float x[N], highest = high;
        load(x, column);
#pragma unroll
        for (int i = 0; i < N; i++) highest = fmaxf(highest, x[i]);
        sum *= __expf(high - highest);
        high = highest;
#pragma unroll
        for (int i = 0; i < N; i++) sum += __expf(x[i] - high);
    }
    float highest = high;
    for (int apart = 16; apart; apart /= 2) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, apart));
    sum *= __expf(high - highest);
    for (int apart = 16; apart; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
    const float inverse = 1 / sum;
    for (int column = lane * N; column < padded; column += 32 * N) {
        float x[N];
        load(x, column);
        u32 a[N / 2], b[N / 2];
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            float low = __expf(x[i] - highest) * inverse, top = __expf(x[i + 1] - highest) * inverse;
            a[i / 2] = take(low);
            a[i / 2] |= take(top) << 16;
            b[i / 2] = take(low);
            b[i / 2] |= take(top) << 16;
        }
        const uint4 first = make_uint4(a[0], a[1], a[2], a[3]);
        *(uint4*)(to + column) = first;
        *(uint4*)(to + padded + column) = make_uint4(b[0], b[1], b[2], b[3]);
        *(uint4*)(to + 2 * padded + column) = first;
    }
}
