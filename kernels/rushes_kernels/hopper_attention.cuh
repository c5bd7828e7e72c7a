// What attention on sm_90a is made of: one step of it, a query tile of 64 rows in the registers of a warpgroup against the
// keys and values of one tile in shared memory. Put behind hopper.cuh by nvrtc.py.
//
// Macros: DIM channels of a head, 64 or 128; TILE_ROWS keys of a tile in shared memory.

constexpr int TILE_BYTES = TILE_ROWS * DIM * 2, SLOT_BYTES = 2 * TILE_BYTES;

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Keys are K-major, values MN-major; panels of 64 channels follow each other.
constexpr u32 PANEL = TILE_ROWS * 128 >> 4, KEYS_STEP = 2, VALUES_STEP = 128, VALUES_OFFSET = TILE_BYTES >> 4;
constexpr u32 KEYS_LOW = K_MAJOR, VALUES_LOW = PANEL << 16;

#define A4(a) "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
// d = a b^T (+ d): 16 channels of 16, 32, 64 or 128 keys
__device__ __forceinline__ void score(float (&d)[8], const u32 (&a)[4], u64 b, int add) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %13, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32." ELEMENT "." ELEMENT " {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, "
        "%12, p, 1, 1, 0; }"
        : F4(d, 0), F4(d, 4)
        : A4(a), "l"(b), "r"(add));
}
__device__ __forceinline__ void score(float (&d)[16], const u32 (&a)[4], u64 b, int add) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %21, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32." ELEMENT "." ELEMENT " {" P16_0 "}, {%16, %17, %18, %19}, %20, p, 1, 1, 0; }"
        : F16(d, 0)
        : A4(a), "l"(b), "r"(add));
}
__device__ __forceinline__ void score(float (&d)[32], const u32 (&a)[4], u64 b, int add) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." ELEMENT "." ELEMENT " {" P16_0 ", " P16_1
        "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0; }"
        : F16(d, 0), F16(d, 16)
        : A4(a), "l"(b), "r"(add));
}
__device__ __forceinline__ void score(float (&d)[64], const u32 (&a)[4], u64 b, int add) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." ELEMENT "." ELEMENT " {" P16_0 ", " P16_1 ", " P16_2 ", " P16_3
        "}, {%64, %65, %66, %67}, %68, p, 1, 1, 0; }"
        : F16(d, 0), F16(d, 16), F16(d, 32), F16(d, 48)
        : A4(a), "l"(b), "r"(add));
}
// d += a b: 16 keys, all channels
__device__ __forceinline__ void accumulate(float (&d)[32], const u32 (&a)[4], u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." ELEMENT "." ELEMENT " {" P16_0 ", " P16_1
        "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
        : F16(d, 0), F16(d, 16)
        : A4(a), "l"(b));
}
__device__ __forceinline__ void accumulate(float (&d)[64], const u32 (&a)[4], u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." ELEMENT "." ELEMENT " {" P16_0 ", " P16_1 ", " P16_2 ", " P16_3
        "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
        : F16(d, 0), F16(d, 16), F16(d, 32), F16(d, 48)
        : A4(a), "l"(b));
}

// ---- attention of a query tile

// What a thread holds of its warpgroup's query tile: of rows lane / 4 and lane / 4 + 8 of the warp's 16, the output
// columns 8 i + lane % 4 * 2 and the next, the reference of the softmax, the score above which it has to move, as an
// integer, and this thread's part of the sum.
struct Rows {
    u32 q[DIM / 16][4];
    float out[DIM / 2], reference[2], sum[2];
    int limit[2];
};

// Finite, so that a difference of two of them is 0 and not NaN.
constexpr float LOWEST = -1e30f;
// The reference of rows past a tile's size: their weights are 0. Products of zeros cost less power, the kernel's limit.
constexpr float HIGHEST = 1e30f;
// References move only when a row has outgrown its own by 2^10: the same reference divides out again, exactly.
constexpr float MAX_GROWTH = 10.f;
constexpr int ALWAYS = -2147483647 - 1;

// Read as integers, floats from 0 on are in order and above all negative ones: three of them are compared by one
// instruction. A negative limit cannot be told that way; such rows, which are rare, look closely at every tile. The lowest
// integer is -0.
__device__ __forceinline__ int limit_of(float reference, float log2_scale) {
    const float limit = reference + MAX_GROWTH / log2_scale;
    return limit < 0 ? ALWAYS : __float_as_int(limit);
}

// One tile at `low`, the `valid` first of its KEYS keys; all of them unless RAGGED. `meanwhile` is done while the tensor
// cores work. Values are added in PARTS parts, each as soon as its weights are there: exponentials of the next part run
// under the products of the last.
template <int KEYS, bool RAGGED, int PARTS, class Meanwhile>
__device__ __forceinline__ void attend_tile(Rows& rows, u32 low, int valid, float log2_scale, int lane,
                                            const Meanwhile& meanwhile) {
    float s[KEYS / 2];
    pin(s);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < DIM / 16; k++)
        score(s, rows.q[k], descriptor((low | KEYS_LOW) + k / 4 * PANEL + k % 4 * KEYS_STEP), k > 0);
    wgmma_commit();
    meanwhile();
    wgmma_wait();
    pin(s);

    if (RAGGED) {
        const int column = lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < KEYS / 8; i++) {
            if (8 * i + column >= valid) s[4 * i] = s[4 * i + 2] = LOWEST;
            if (8 * i + column + 1 >= valid) s[4 * i + 1] = s[4 * i + 3] = LOWEST;
        }
    }
    int top[2] = {ALWAYS, ALWAYS};
#pragma unroll
    for (int i = 0; i < KEYS / 2; i += 2)
        top[i / 2 % 2] = __vimax3_s32(top[i / 2 % 2], __float_as_int(s[i]), __float_as_int(s[i + 1]));
    // the branch also keeps the compiler from sinking the exponentials below the next wait
    if (__any_sync(~0u, top[0] >= rows.limit[0] || top[1] >= rows.limit[1])) {
        float factor[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float high = rows.reference[r];
#pragma unroll
            for (int i = 2 * r; i < KEYS / 2; i += 4) high = fmaxf(high, fmaxf(s[i], s[i + 1]));
            high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
            high = fmaxf(high, __shfl_xor_sync(~0u, high, 2));
            // what happens to a row is up to itself alone
            if (__float_as_int(high) < rows.limit[r]) high = rows.reference[r];
            factor[r] = exp2_fast((rows.reference[r] - high) * log2_scale);
            rows.reference[r] = high;
            rows.limit[r] = limit_of(high, log2_scale);
            rows.sum[r] *= factor[r];
        }
#pragma unroll
        for (int i = 0; i < DIM / 2; i++) rows.out[i] *= factor[i / 2 % 2];
    }

    const float shift[2] = {-rows.reference[0] * log2_scale, -rows.reference[1] * log2_scale};
    const auto exponent = [&](int i) { return fmaf(s[i], log2_scale, shift[i / 2 % 2]); };
    float w[KEYS / 2];
    if (PARTS > 1) {
        // accumulators, finished or not, cannot be read while products are in flight
#pragma unroll
        for (int i = 0; i < KEYS / 2; i++) w[i] = exponent(i);
    }
    float sum[2] = {0, 0};
    constexpr int KEYS_OF_PART = KEYS / PARTS;
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        u32 p[KEYS_OF_PART / 16][4];
#pragma unroll
        for (int j = 0; j < KEYS_OF_PART / 2; j++) {
            const int i = part * (KEYS_OF_PART / 2) + j;
            w[i] = exp2_fast(PARTS > 1 ? w[i] : exponent(i));
            sum[i / 2 % 2] += w[i];
        }
#pragma unroll
        for (int j = 0; j < KEYS_OF_PART / 4; j++) {
            const int i = part * (KEYS_OF_PART / 2) + 2 * j;
            p[j / 4][j % 4] = pack(w[i], w[i + 1]);
        }
        if (!part) pin(rows.out);
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < KEYS_OF_PART / 16; j++)
            accumulate(rows.out, p[j],
                       descriptor((low + VALUES_OFFSET | VALUES_LOW) + (part * (KEYS_OF_PART / 16) + j) * VALUES_STEP));
        wgmma_commit();
    }
    rows.sum[0] += sum[0];
    rows.sum[1] += sum[1];
    wgmma_wait();
    pin(rows.out);
}

// Nothing is summed up yet. Rows of which there are none from the first (`spare` <= 0) or the second (`spare` <= 8) on
// have weights of 0.
__device__ __forceinline__ void begin_rows(Rows& rows, int spare, float log2_scale) {
#pragma unroll
    for (int i = 0; i < DIM / 2; i++) rows.out[i] = 0;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        rows.reference[r] = spare > 8 * r ? LOWEST : HIGHEST;
        rows.limit[r] = limit_of(rows.reference[r], log2_scale);
        rows.sum[r] = 0;
    }
}

// What the rows' results are to be multiplied by; the sums of a row's four threads are added up.
__device__ __forceinline__ void finish_rows(const Rows& rows, float (&inverse)[2]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum = rows.sum[r];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        inverse[r] = sum == 0 ? 0 : 1 / sum;
    }
}
