// Attention of all tokens to all tokens for sm_90a, heads of 64 channels, compiled by NVRTC behind hopper_attention.cuh.
//
// A unit is GROUP * ROWS query rows of one head of one batch; a block takes every gridDim.x-th. One producer thread
// streams keys and values of the head through a ring of STAGES slots by TMA, which fills rows past the last token with
// zeros, and loads the queries of the next unit while one is computed. Each of GROUP consumer warpgroups computes the
// rows of its own against every tile.

constexpr int GROUP = 3, STAGES = 6;
constexpr int QUERY_BYTES = GROUP * ROWS * DIM * 2;
constexpr int CONSUMER_REGISTERS = 160, PRODUCER_REGISTERS = 32;

struct Shape {
    int tokens, heads, units;

    __device__ int tiles() const { return (tokens + TILE_ROWS - 1) / TILE_ROWS; }
    __device__ int blocks() const { return (tokens + GROUP * ROWS - 1) / (GROUP * ROWS); }
};

// TILE_ROWS rows of one head, which are 128 bytes each, with the 128-byte swizzle.
__device__ __forceinline__ void load_tile(u32 target, const TensorMap* map, int head, int token, int batch,
                                          u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
        "[%6];" ::"r"(target),
        "l"(map), "r"(0), "r"(head), "r"(token), "r"(batch), "r"(barrier)
        : "memory");
}

// 16 rows by 16 channels in the layout of an A operand
__device__ __forceinline__ void load_operand(u32 (&a)[4], u32 source) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(source)
                 : "memory");
}

// heads_of, queries_of: (batches, tokens, 3 * heads, DIM), the heads of q, of k, of v, as tensor maps of TILE_ROWS and of
// GROUP * ROWS tokens. out: (batches, tokens, heads, DIM).
extern "C" __global__ void __launch_bounds__(128 * (1 + GROUP), 1)
    attend_heads(const __grid_constant__ TensorMap heads_of, const __grid_constant__ TensorMap queries_of, u32* out,
                 Shape shape, float log2_scale) {
    extern __shared__ int scratch[];
    u32 slots;
    // opaque to the compiler, which otherwise works the base out anew at every use
    asm volatile("mov.b32 %0, %1;" : "=r"(slots) : "r"((u32)__cvta_generic_to_shared(scratch) + 1023 & ~1023u));
    const u32 queries = slots + STAGES * SLOT_BYTES;
    const u32 full = queries + QUERY_BYTES, empty = full + 8 * STAGES, queries_full = empty + 8 * STAGES,
              queries_empty = queries_full + 8;
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, 4 * GROUP);
        }
        barrier_init(queries_full, 1);
        barrier_init(queries_empty, 4 * GROUP);
        asm volatile("fence.mbarrier_init.release.cluster;");
    }
    __syncthreads();
    const int tiles = shape.tiles(), blocks = shape.blocks();
    u32 slot = 0, turn = 0, unit_turn = 0;
    const auto advance = [&] {
        if (++slot == STAGES) slot = 0, turn ^= 1;
    };
    if (warpgroup == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        if (threadIdx.x) return;
#pragma unroll 1
        for (int unit = blockIdx.x; unit < shape.units; unit += gridDim.x) {
            const int head = unit / blocks % shape.heads, batch = unit / blocks / shape.heads;
            barrier_wait(queries_empty, unit_turn ^ 1);
            unit_turn ^= 1;
            barrier_expect(queries_full, QUERY_BYTES);
            load_tile(queries, &queries_of, head, unit % blocks * GROUP * ROWS, batch, queries_full);
#pragma unroll 1
            for (int tile = 0; tile < tiles; tile++) {
                const u32 target = slots + slot * SLOT_BYTES;
                barrier_wait(empty + 8 * slot, turn ^ 1);
                barrier_expect(full + 8 * slot, SLOT_BYTES);
                load_tile(target, &heads_of, shape.heads + head, tile * TILE_ROWS, batch, full + 8 * slot);
                load_tile(target + TILE_BYTES, &heads_of, 2 * shape.heads + head, tile * TILE_ROWS, batch,
                          full + 8 * slot);
                advance();
            }
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
    const int last = shape.tokens - (tiles - 1) * TILE_ROWS;  // keys of the last tile
    // this lane's row of the four matrices that a warp loads at once, with the swizzle of 128 bytes
    const u32 query_row = queries + ((threadIdx.x - 128) / 32 * 16 + lane % 16) * (DIM * 2);
    Rows rows;
#pragma unroll 1
    for (int unit = blockIdx.x; unit < shape.units; unit += gridDim.x) {
        const int head = unit / blocks % shape.heads, batch = unit / blocks / shape.heads;
        const int row = (unit % blocks * GROUP + warpgroup - 1) * ROWS + threadIdx.x % 128 / 32 * 16 + lane / 4;
        const i64 first = (i64)batch * shape.tokens;
        barrier_wait(queries_full, unit_turn);
        unit_turn ^= 1;
#pragma unroll
        for (int k = 0; k < DIM / 16; k++)
            load_operand(rows.q[k], query_row + ((2 * k + lane / 16 ^ lane) % 8) * 16);
        barrier_arrive_if(queries_empty, lane == 0);
        begin_rows(rows, shape.tokens - row, log2_scale);
#pragma unroll 1
        for (int tile = 0; tile < tiles; tile++) {
            const u32 back = empty + 8 * slot;
            // warp-uniform, so that descriptors stay in uniform registers
            const u32 low = __shfl_sync(~0u, ((slots & 0x3ffff) + slot * SLOT_BYTES) >> 4, 0);
            barrier_wait(full + 8 * slot, turn);
            if (tile < tiles - 1 || last == TILE_ROWS) {
                attend_tile<128, false, 1>(rows, low, 128, log2_scale, lane, advance);
            } else if (last <= 16) {
                attend_tile<16, true, 1>(rows, low, last, log2_scale, lane, advance);
            } else if (last <= 32) {
                attend_tile<32, true, 1>(rows, low, last, log2_scale, lane, advance);
            } else if (last <= 64) {
                attend_tile<64, true, 1>(rows, low, last, log2_scale, lane, advance);
            } else {
                attend_tile<128, true, 1>(rows, low, last, log2_scale, lane, advance);
            }
            barrier_arrive_if(back, lane == 0);
        }
        float inverse[2];
        finish_rows(rows, inverse);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            if (row + 8 * r >= shape.tokens) continue;
            u32* target = out + ((first + row + 8 * r) * shape.heads + head) * (DIM / 2) + lane % 4;
#pragma unroll
            for (int i = 0; i < DIM / 8; i++)
                target[i * 4] = pack(rows.out[4 * i + 2 * r] * inverse[r], rows.out[4 * i + 2 * r + 1] * inverse[r]);
        }
    }
}
