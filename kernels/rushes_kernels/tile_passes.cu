// The passes around block-sparse attention, compiled by NVRTC for one element type: TYPE 0 bf16, 1 fp16, 2 fp32; and,
// with LANES, ROTARY and HEADS, `pack_heads` for one shape of heads.
// Rows are read and written in words of 16 bytes; a block takes one tile of one head.

constexpr int THREADS = 256;
constexpr int WORD = TYPE == 2 ? 4 : 8;  // elements in 16 bytes
using Word = Words<TYPE, WORD>;

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

#ifdef LANES
// What `pack` does, for q, k and v at once (blockIdx.z) and HEADS heads a block, whose rows have LANES words. Before that,
// every row of q and k is divided by its root mean square, multiplied by the weight, and its first 2 * ROTARY words are
// turned by the angles of its row: a word and the one ROTARY words behind it are the two coordinates. The means are those
// of the rounded rows. Places past a tile's size become 0: they cost attention less power. cos, sin: (all rows, ROTARY * WORD) fp32. `places` is a multiple of 32.
extern "C" __global__ void __launch_bounds__(THREADS)
    pack_heads(const void* q, const void* k, const void* v, void* q_packed, void* k_packed, void* v_packed,
               float* q_means, float* k_means, float* v_means, const void* q_weight, const void* k_weight,
               const float* cos, const float* sin, const i64* __restrict__ rows, const i64* __restrict__ sizes,
               int heads, int places, i64 row_stride, int head_stride, float eps) {
    constexpr int CHANNELS = LANES * WORD, STEP = THREADS / LANES;
    __shared__ float partial[THREADS / 32][HEADS * CHANNELS];
    const void* x = blockIdx.z == 0 ? q : blockIdx.z == 1 ? k : v;
    void* packed = blockIdx.z == 0 ? q_packed : blockIdx.z == 1 ? k_packed : v_packed;
    float* means = blockIdx.z == 0 ? q_means : blockIdx.z == 1 ? k_means : v_means;
    const bool plain = blockIdx.z == 2;
    const int tile = blockIdx.x, first = blockIdx.y * HEADS, word = threadIdx.x % LANES;
    const int half = word < ROTARY ? word : word < 2 * ROTARY ? word - ROTARY : -1;
    const int partner = word < ROTARY ? word + ROTARY : half < 0 ? word : half;
    const float sign = word < ROTARY ? -1.f : 1.f;
    const int size = sizes[tile];
    float scale[WORD] = {}, sum[HEADS][WORD] = {};
    if (!plain) {
        Word weights;
        weights.load(blockIdx.z == 0 ? q_weight : k_weight, word);
        weights.get(scale);
    }
    // whole warps go round together: the shuffles need all lanes
    for (int place = threadIdx.x / LANES; place < places; place += STEP) {
        const i64 row = rows[(i64)tile * places + place];
        const i64 from = row * row_stride + word;
        Word value[HEADS];
#pragma unroll
        for (int h = 0; h < HEADS; h++) value[h].load_once(x, from + min(first + h, heads - 1) * head_stride);
        if (place >= size)
#pragma unroll
            for (int h = 0; h < HEADS; h++) value[h] = {};
        float c[WORD], s[WORD];
#pragma unroll
        for (int i = 0; i < WORD; i++) c[i] = 1.f, s[i] = 0.f;
        if (!plain && half >= 0) {
            Words<2, WORD> angle;
            angle.load(cos, row * ROTARY + half);
            angle.get(c);
            angle.load(sin, row * ROTARY + half);
            angle.get(s);
#pragma unroll
            for (int i = 0; i < WORD; i++) s[i] *= sign;
        }
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            float a[WORD];
            value[h].get(a);
            if (!plain) {
                float squares = 0.f;
#pragma unroll
                for (int i = 0; i < WORD; i++) squares += a[i] * a[i];
#pragma unroll
                for (int apart = LANES / 2; apart; apart /= 2)
                    squares += __shfl_xor_sync(0xffffffffu, squares, apart);
                const float inverse = rsqrtf(squares / CHANNELS + eps);
#pragma unroll
                for (int i = 0; i < WORD; i++) {
                    a[i] *= inverse * scale[i];
                    a[i] = a[i] * c[i] + s[i] * __shfl_sync(0xffffffffu, a[i], partner, LANES);
                }
                value[h].set(a);
                value[h].get(a);
            }
            if (first + h < heads)
                value[h].store(packed, (((i64)(first + h) * gridDim.x + tile) * places + place) * LANES + word);
#pragma unroll
            for (int i = 0; i < WORD; i++) sum[h][i] += a[i];
        }
    }
    // the rows of a warp are added up first, then those of the block
#pragma unroll
    for (int h = 0; h < HEADS; h++)
#pragma unroll
        for (int i = 0; i < WORD; i++) {
#pragma unroll
            for (int apart = LANES; apart < 32; apart *= 2)
                sum[h][i] += __shfl_xor_sync(0xffffffffu, sum[h][i], apart);
            if (threadIdx.x % 32 < LANES) partial[threadIdx.x / 32][(h * LANES + word) * WORD + i] = sum[h][i];
        }
    __syncthreads();
    for (int at = threadIdx.x; at < HEADS * CHANNELS; at += THREADS) {
        const int head = first + at / CHANNELS;
        float total = 0;
#pragma unroll
        for (int i = 0; i < THREADS / 32; i++) total += partial[i][at];
        if (head < heads) means[((i64)head * gridDim.x + tile) * CHANNELS + at % CHANNELS] = total / size;
    }
}
#endif

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
