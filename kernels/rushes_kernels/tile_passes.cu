// The passes around block-sparse attention, compiled by NVRTC for one element type: TYPE 0 bf16, 1 fp16, 2 fp32.
// Rows are read and written in words of 16 bytes; a block takes one tile of one head.

typedef unsigned int u32;
typedef long long i64;

constexpr int THREADS = 256;
constexpr int WORD = TYPE == 2 ? 4 : 8;  // elements in 16 bytes

__device__ __forceinline__ void widen(const uint4& word, float (&x)[WORD]) {
    const u32 parts[4] = {word.x, word.y, word.z, word.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if constexpr (TYPE == 0) {
            x[2 * i] = __uint_as_float(parts[i] << 16);
            x[2 * i + 1] = __uint_as_float(parts[i] & 0xffff0000u);
        } else if constexpr (TYPE == 1) {
            asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high; }"
                : "=f"(x[2 * i]), "=f"(x[2 * i + 1])
                : "r"(parts[i]));
        } else {
            x[i] = __uint_as_float(parts[i]);
        }
    }
}

__device__ __forceinline__ uint4 narrow(const float (&x)[WORD]) {
    u32 parts[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if constexpr (TYPE == 0)
            asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(parts[i]) : "f"(x[2 * i + 1]), "f"(x[2 * i]));
        else if constexpr (TYPE == 1)
            asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(parts[i]) : "f"(x[2 * i + 1]), "f"(x[2 * i]));
        else
            parts[i] = __float_as_uint(x[i]);
    }
    return make_uint4(parts[0], parts[1], parts[2], parts[3]);
}

// x: rows of `heads` heads with strides in words; rows: (tiles, places); packed: (heads, tiles, places, words of a row);
// means: (heads, tiles, channels) fp32. `words` is a power of two up to 32.
extern "C" __global__ void __launch_bounds__(THREADS)
    pack(const uint4* __restrict__ x, uint4* packed, float* means, const i64* __restrict__ rows,
         const i64* __restrict__ sizes, int places, int words, i64 row_stride, i64 head_stride) {
    __shared__ float partial[THREADS * WORD];
    const int tile = blockIdx.x, head = blockIdx.y, word = threadIdx.x % words, step = THREADS / words;
    const i64 out = (i64)head * gridDim.x + tile;
    const int size = sizes[tile];
    float sum[WORD] = {};
#pragma unroll 4
    for (int place = threadIdx.x / words; place < places; place += step) {
        const uint4 value = x[rows[(i64)tile * places + place] * row_stride + head * head_stride + word];
        packed[(out * places + place) * words + word] = value;
        float wide[WORD];
        widen(value, wide);
#pragma unroll
        for (int i = 0; i < WORD; i++) sum[i] += place < size ? wide[i] : 0.f;
    }
#pragma unroll
    for (int i = 0; i < WORD; i++) partial[threadIdx.x * WORD + i] = sum[i];
    __syncthreads();
    const int channels = words * WORD;
    for (int channel = threadIdx.x; channel < channels; channel += THREADS) {
        float total = 0;
        for (int i = 0; i < step; i++) total += partial[i * channels + channel];
        means[out * channels + channel] = total / size;
    }
}

// fine: (heads, tiles, places, words of a row); coarse: (heads, tiles, channels) fp32 or null, gate with strides in
// words; out: (rows, heads, words of a row). Only valid places are written.
extern "C" __global__ void __launch_bounds__(THREADS)
    unpack(const uint4* __restrict__ fine, const float* __restrict__ coarse, const uint4* __restrict__ gate, uint4* out,
           const i64* __restrict__ rows, const i64* __restrict__ sizes, int places, int words, i64 gate_row_stride,
           i64 gate_head_stride) {
    const int tile = blockIdx.x, head = blockIdx.y, word = threadIdx.x % words, step = THREADS / words;
    const i64 at = (i64)head * gridDim.x + tile;
    const int size = sizes[tile];
    float added[WORD] = {};
    if (coarse)
#pragma unroll
        for (int i = 0; i < WORD; i++) added[i] = coarse[(at * words + word) * WORD + i];
#pragma unroll 4
    for (int place = threadIdx.x / words; place < size; place += step) {
        const i64 row = rows[(i64)tile * places + place];
        uint4 value = fine[(at * places + place) * words + word];
        if (coarse) {
            float sum[WORD], factor[WORD];
            widen(value, sum);
            widen(gate[row * gate_row_stride + head * gate_head_stride + word], factor);
#pragma unroll
            for (int i = 0; i < WORD; i++) sum[i] += added[i] * factor[i];
            value = narrow(sum);
        }
        out[(row * gridDim.y + head) * words + word] = value;
    }
}
