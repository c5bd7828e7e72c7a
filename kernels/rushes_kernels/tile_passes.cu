// The passes around block-sparse attention, compiled by NVRTC for one element type: TYPE 0 bf16, 1 fp16, 2 fp32; and,
// with LANES, ROTARY, HEADS and PLACES, `pack_heads` for one shape of heads and tiles.
// Rows are read and written in words of 16 bytes; a block takes one tile of one head. A tile may be empty: its means
// are 0.

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
        means[out * channels + channel] = total / max(size, 1);
    }
}

#ifdef LANES
// What `pack` does, for q, k and v at once (blockIdx.z) and HEADS heads a block, one after the other, whose rows have
// LANES words. Before that, every row of q and k is divided by its root mean square, multiplied by the weight, and its
// first 2 * ROTARY words are turned by the angles of its row: a word and the one ROTARY words behind it are the two
// coordinates. The means are those of the rounded rows. Places past a tile's size become 0: they cost attention less
// power. cos, sin: (all rows, ROTARY * WORD) fp32. PLACES is a multiple of 32.
//
// A thread takes two words of a row, both coordinates where they are turned, in the same rows of every head: the angles
// stay in its registers, and the words of the next head are on their way meanwhile.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    pack_heads(const void* q, const void* k, const void* v, void* q_packed, void* k_packed, void* v_packed,
               float* q_means, float* k_means, float* v_means, const void* q_weight, const void* k_weight,
               const float* cos, const float* sin, const i64* __restrict__ rows, const i64* __restrict__ sizes,
               int heads, i64 row_stride, int head_stride, float eps) {
    constexpr int CHANNELS = LANES * WORD, PAIRS = LANES / 2, STEP = THREADS / PAIRS, WARPS = THREADS / 32;
    constexpr int ROUNDS = (PLACES + STEP - 1) / STEP;
    __shared__ float partial[WARPS][HEADS * CHANNELS];
    const void* x = blockIdx.z == 0 ? q : blockIdx.z == 1 ? k : v;
    void* packed = blockIdx.z == 0 ? q_packed : blockIdx.z == 1 ? k_packed : v_packed;
    float* means = blockIdx.z == 0 ? q_means : blockIdx.z == 1 ? k_means : v_means;
    const bool plain = blockIdx.z == 2;
    const int tile = blockIdx.x, first = blockIdx.y * HEADS, here = min(HEADS, heads - first);
    const int lane = threadIdx.x % 32, pair = threadIdx.x % PAIRS, size = sizes[tile];
    const bool turned = pair < ROTARY, upper = lane >= 16;
    const int low = turned ? pair : ROTARY + pair, high = low + (turned ? ROTARY : PAIRS - ROTARY);

    Word weight[2];
    if (!plain) {
        weight[0].load(blockIdx.z == 0 ? q_weight : k_weight, low);
        weight[1].load(blockIdx.z == 0 ? q_weight : k_weight, high);
    }
    i64 from[ROUNDS];
    float c[ROUNDS][WORD], s[ROUNDS][WORD];
    Word next[ROUNDS][2];
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        const i64 row = rows[(i64)tile * PLACES + min(r * STEP + (int)threadIdx.x / PAIRS, PLACES - 1)];
        from[r] = row * row_stride + first * head_stride;
        next[r][0].load_once(x, from[r] + low);
        next[r][1].load_once(x, from[r] + high);
#pragma unroll
        for (int i = 0; i < WORD; i++) c[r][i] = 1.f, s[r][i] = 0.f;
        if (!plain && turned) {
            Words<2, WORD> angle;
            angle.load(cos, row * ROTARY + pair);
            angle.get(c[r]);
            angle.load(sin, row * ROTARY + pair);
            angle.get(s[r]);
        }
    }
#pragma unroll 1
    for (int h = 0; h < here; h++) {
        Word value[ROUNDS][2];
#pragma unroll
        for (int r = 0; r < ROUNDS; r++) {
            value[r][0] = next[r][0];
            value[r][1] = next[r][1];
        }
        if (h + 1 < here)
#pragma unroll
            for (int r = 0; r < ROUNDS; r++) {
                next[r][0].load_once(x, from[r] + (h + 1) * head_stride + low);
                next[r][1].load_once(x, from[r] + (h + 1) * head_stride + high);
            }
        float sum[2][WORD] = {};
#pragma unroll
        for (int r = 0; r < ROUNDS; r++) {
            const int place = r * STEP + threadIdx.x / PAIRS;
            if (place >= size) value[r][0] = value[r][1] = {};
            float a[WORD], b[WORD];
            value[r][0].get(a);
            value[r][1].get(b);
            if (!plain) {
                float squares = 0.f, scale[WORD];
#pragma unroll
                for (int i = 0; i < WORD; i++) squares += a[i] * a[i] + b[i] * b[i];
                const float inverse = rsqrtf(lane_sum(squares, PAIRS) / CHANNELS + eps);
                weight[0].get(scale);
#pragma unroll
                for (int i = 0; i < WORD; i++) a[i] *= inverse * scale[i];
                weight[1].get(scale);
#pragma unroll
                for (int i = 0; i < WORD; i++) {
                    const float x1 = a[i], x2 = b[i] * (inverse * scale[i]);
                    a[i] = x1 * c[r][i] - x2 * s[r][i];
                    b[i] = x2 * c[r][i] + x1 * s[r][i];
                }
                value[r][0].set(a);
                value[r][0].get(a);
                value[r][1].set(b);
                value[r][1].get(b);
            }
            if (ROUNDS * STEP == PLACES || place < PLACES) {
                const i64 to = (((i64)(first + h) * gridDim.x + tile) * PLACES + place) * LANES;
                value[r][0].store_once(packed, to + low);
                value[r][1].store_once(packed, to + high);
#pragma unroll
                for (int i = 0; i < WORD; i++) sum[0][i] += a[i], sum[1][i] += b[i];
            }
        }
        // one half of a warp adds up the low words of its rows, the other half the high ones
#pragma unroll
        for (int i = 0; i < WORD; i++) {
            const float others = __shfl_xor_sync(0xffffffffu, upper ? sum[0][i] : sum[1][i], 16);
            float total = (upper ? sum[1][i] : sum[0][i]) + others;
#pragma unroll
            for (int apart = PAIRS; apart < 16; apart *= 2) total += __shfl_xor_sync(0xffffffffu, total, apart);
            if (lane % 16 < PAIRS)
                partial[threadIdx.x / 32][(h * LANES + (upper ? high : low)) * WORD + i] = total;
        }
    }
    __syncthreads();
    for (int at = threadIdx.x; at < here * CHANNELS; at += THREADS) {
        float total = 0;
#pragma unroll
        for (int i = 0; i < WARPS; i++) total += partial[i][at];
        means[((i64)(first + at / CHANNELS) * gridDim.x + tile) * CHANNELS + at % CHANNELS] = total / max(size, 1);
    }
}
#endif

// fine: (heads, tiles, places, words of a row); coarse: (heads, tiles, channels) fp32 or null, gate with strides in
// words; out: (rows, heads, words of a row), row i going to its row targets[i], or i if there are none. Valid
// places are written; a row that lies in no valid place, but in one past a size, becomes 0.
extern "C" __global__ void __launch_bounds__(THREADS)
    unpack(const void* fine, const float* __restrict__ coarse, const void* gate, void* out,
           const i64* __restrict__ targets, const i64* __restrict__ rows, const i64* __restrict__ sizes, int places,
           int words, i64 gate_row_stride, i64 gate_head_stride) {
    const int tile = blockIdx.x, head = blockIdx.y, word = threadIdx.x % words, step = THREADS / words;
    const i64 at = (i64)head * gridDim.x + tile;
    const int size = sizes[tile];
    float added[WORD] = {};
    if (coarse)
#pragma unroll
        for (int i = 0; i < WORD; i++) added[i] = coarse[(at * words + word) * WORD + i];
#pragma unroll 4
    for (int place = threadIdx.x / words; place < size; place += step) {
        const i64 row = rows[(i64)tile * places + place], target = targets ? targets[row] : row;
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
        value.store(out, (target * gridDim.y + head) * words + word);
    }
    // places past the size repeat the last row, or have rows of their own that are left out
    for (int place = size + threadIdx.x / words; place < places; place += step) {
        const i64 row = rows[(i64)tile * places + place], target = targets ? targets[row] : row;
        if (size && row == rows[(i64)tile * places + size - 1]) break;
        const Word zeros = {};
        zeros.store(out, (target * gridDim.y + head) * words + word);
    }
}
