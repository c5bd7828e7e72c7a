// The passes around block-sparse attention, compiled by NVRTC for one element type: TYPE 0 bf16, 1 fp16, 2 fp32.
// Rows are read and written in words of 16 bytes; a block takes one tile of one head.

constexpr int THREADS = 256;
constexpr int WORD = TYPE == 2 ? 4 : 8;  // elements in 16 bytes
using Word = Words<TYPE, WORD>;

// Adds up the channels of the rows that the threads of a block hold, `words` of them a row, and writes the mean of
// `size` rows. `partial` has room for all of them; the block waits before and after.
__device__ __forceinline__ void write_means(float* partial, const float (&sum)[WORD], float* means, int words, int size) {
    const int channels = words * WORD;
#pragma unroll
    for (int i = 0; i < WORD; i++) partial[threadIdx.x * WORD + i] = sum[i];
    __syncthreads();
    for (int channel = threadIdx.x; channel < channels; channel += THREADS) {
        float total = 0;
        for (int i = 0; i < THREADS / words; i++) total += partial[i * channels + channel];
        means[channel] = total / size;
    }
    __syncthreads();
}

// x: rows of `heads` heads with strides in words; rows: (tiles, places); packed: (heads, tiles, places, words of a row);
// means: (heads, tiles, channels) fp32. `words` is a power of two up to 32.
extern "C" __global__ void __launch_bounds__(THREADS)
    pack(const void* x, void* packed, float* means, const i64* __restrict__ rows,
         const i64* __restrict__ sizes, int places, int words, i64 row_stride, i64 head_stride) {
    __shared__ float partial[THREADS * WORD];
    const int tile = blockIdx.x, head = blockIdx.y, word = threadIdx.x % words, step = THREADS / words;
    const i64 out = (i64)head * gridDim.x + tile;
    const int size = sizes[tile];
    float sum[WORD] = {};
#pragma unroll 4
    for (int place = threadIdx.x / words; place < places; place += step) {
        Word value;
        value.load(x, rows[(i64)tile * places + place] * row_stride + head * head_stride + word);
        value.store(packed, (out * places + place) * words + word);
        float wide[WORD];
        value.get(wide);
#pragma unroll
        for (int i = 0; i < WORD; i++) sum[i] += place < size ? wide[i] : 0.f;
    }
    write_means(partial, sum, means + out * words * WORD, words, size);
}

// What `pack` does, for q, k and v at once (blockIdx.z), and for `per_block` heads a block. Before that, every row of q
// and k is divided by its root mean square, multiplied by the weight, and its first 2 * `rotary` words are turned by the
// angles of its row: a word and the one `rotary` words behind it are the two coordinates. The means are those of the
// rounded rows. cos, sin: (all rows, rotary * WORD) fp32.
extern "C" __global__ void __launch_bounds__(THREADS)
    pack_heads(const void* q, const void* k, const void* v, void* q_packed, void* k_packed, void* v_packed,
               float* q_means, float* k_means, float* v_means, const void* q_weight, const void* k_weight,
               const float* cos, const float* sin, const i64* __restrict__ rows, const i64* __restrict__ sizes,
               int heads, int per_block, int places, int words, int rotary, i64 row_stride, i64 head_stride, float eps) {
    __shared__ float partial[THREADS * WORD];
    const void* x = blockIdx.z == 0 ? q : blockIdx.z == 1 ? k : v;
    void* packed = blockIdx.z == 0 ? q_packed : blockIdx.z == 1 ? k_packed : v_packed;
    float* means = blockIdx.z == 0 ? q_means : blockIdx.z == 1 ? k_means : v_means;
    const void* weight = blockIdx.z == 0 ? q_weight : k_weight;
    const bool plain = blockIdx.z == 2;
    const int tile = blockIdx.x, word = threadIdx.x % words, step = THREADS / words;
    const int half = word < rotary ? word : word < 2 * rotary ? word - rotary : -1;
    const int partner = word < rotary ? word + rotary : half < 0 ? word : half;
    const float sign = word < rotary ? -1.f : 1.f;
    const int size = sizes[tile];
    float scale[WORD] = {};
    if (!plain) {
        Word weights;
        weights.load(weight, word);
        weights.get(scale);
    }
    const int last = min(heads, (int)(blockIdx.y + 1) * per_block);
    for (int head = blockIdx.y * per_block; head < last; head++) {
        const i64 out = (i64)head * gridDim.x + tile;
        float sum[WORD] = {};
        // whole warps go round together: the shuffles need all lanes
#pragma unroll 4
        for (int place = threadIdx.x / words; place < places; place += step) {
            const i64 row = rows[(i64)tile * places + place];
            Word value;
            float a[WORD];
            value.load_once(x, row * row_stride + head * head_stride + word);
            value.get(a);
            if (!plain) {
                float squares = 0.f, c[WORD], s[WORD];
#pragma unroll
                for (int i = 0; i < WORD; i++) squares += a[i] * a[i], c[i] = 1.f, s[i] = 0.f;
                const float inverse = rsqrtf(lane_sum(squares, words) / (words * WORD) + eps);
                if (half >= 0) {
                    Words<2, WORD> angle;
                    angle.load(cos, row * rotary + half);
                    angle.get(c);
                    angle.load(sin, row * rotary + half);
                    angle.get(s);
                }
#pragma unroll
                for (int i = 0; i < WORD; i++) {
                    a[i] *= inverse * scale[i];
                    const float other = __shfl_sync(0xffffffffu, a[i], partner, words);
                    a[i] = a[i] * c[i] + sign * s[i] * other;
                }
                value.set(a);
                value.get(a);
            }
            value.store(packed, (out * places + place) * words + word);
#pragma unroll
            for (int i = 0; i < WORD; i++) sum[i] += place < size ? a[i] : 0.f;
        }
        write_means(partial, sum, means + out * words * WORD, words, size);
    }
}

// fine: (heads, tiles, places, words of a row); coarse: (heads, tiles, channels) fp32 or null, gate with strides in
// words; out: (rows, heads, words of a row). Only valid places are written.
extern "C" __global__ void __launch_bounds__(THREADS)
    unpack(const void* fine, const float* __restrict__ coarse, const void* gate, void* out,
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
        Word value;
        value.load(fine, (at * places + place) * words + word);
        if (coarse) {
            Word factors;
            float sum[WORD], factor[WORD];
            value.get(sum);
            factors.load(gate, row * gate_row_stride + head * gate_head_stride + word);
            factors.get(factor);
#pragma unroll
            for (int i = 0; i < WORD; i++) sum[i] += added[i] * factor[i];
            value.set(sum);
        }
        value.store(out, (row * gridDim.y + head) * words + word);
    }
}
