// Products of rows and weights for sm_90a, for what follows them in the same kernel. Put behind hopper.cuh by nvrtc.py.
//
// A cluster of two blocks computes a unit of 256 rows, each block BLOCK_ROWS of them, by 2 * COLUMNS columns of
// products. One producer thread of a block streams DEPTH channels of rows and weights a step through a ring of STAGES
// slots by TMA; one half of the columns is loaded by the first block for both, the other by the second. Each of GROUP
// consumer warpgroups computes 64 rows. The second stays LAG steps behind the first: what follows the products of the
// one runs under products of the other.
//
// Macros: SCALED is defined where rows and weights are e4m3; they are of TYPE otherwise. Results are of TYPE either way.

#ifdef SCALED
#define PRODUCT "m64n256k32.f32.e4m3.e4m3"
#define TRANSPOSED ""
constexpr int ELEMENT_BYTES = 1;
#else
#define PRODUCT "m64n256k16.f32." ELEMENT "." ELEMENT
#define TRANSPOSED ", 0, 0"
constexpr int ELEMENT_BYTES = 2;
#endif
constexpr int BLOCK_ROWS = 128, COLUMNS = 128, STAGES = 4, CLUSTER = 2, GROUP = 2, LAG = 2;
constexpr int ROW_BYTES = 128, DEPTH = ROW_BYTES / ELEMENT_BYTES;  // of a panel; a product takes 32 bytes
constexpr int CONSUMER_REGISTERS = 232, PRODUCER_REGISTERS = 40;
constexpr int PANEL_BYTES = 128 * ROW_BYTES;
constexpr int SLOT_BYTES = 3 * PANEL_BYTES;     // rows, both halves of the columns
constexpr int OUT_BYTES = ROWS * COLUMNS * 2;   // of a warpgroup: two panels of 64 columns
constexpr int LAG_BARRIER = 1, OUT_BARRIER = 2;
// Cluster rows that are computed together, column by column. What the clusters load at one time is least when this is
// about the root of their number.
constexpr int BAND = 8;
// Polls of one wait for the other clusters, some hundred microseconds: what the wait is for may not be running yet.
constexpr int PATIENCE = 256;

struct Shape {
    int rows, width, depth;  // width: columns of out
    int unit_columns;        // of out
    int second_half;         // rows of the weight from the first half of a unit's columns to the second

    __device__ int row_blocks() const { return (rows + CLUSTER * BLOCK_ROWS - 1) / (CLUSTER * BLOCK_ROWS); }
    __device__ int column_blocks() const { return width / unit_columns; }
    __device__ int units() const { return row_blocks() * column_blocks(); }
    __device__ int steps() const { return depth / DEPTH; }
    // first row of a block's part of a unit and first column
    __device__ void locate(int unit, int rank, int& row, int& column) const {
        const int of_band = BAND * column_blocks(), first = unit / of_band * BAND;
        const int high = min(BAND, row_blocks() - first), at = unit % of_band;
        row = ((first + at % high) * CLUSTER + rank) * BLOCK_ROWS;
        column = at / high * unit_columns;
    }
};

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive_at(u32 barrier, u32 rank) {
    asm volatile(
        "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(barrier),
        "r"(rank)
        : "memory");
}
template <int THREADS>
__device__ __forceinline__ void named_sync(int name) {
    asm volatile("bar.sync %0, %1;" ::"r"(name), "n"(THREADS) : "memory");
}
// 128 rows by DEPTH channels
__device__ __forceinline__ void load_panel(u32 target, const TensorMap* map, int channel, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
            "r"(target),
        "l"(map), "r"(channel), "r"(row), "r"(barrier)
        : "memory");
}
// the same into every block of the cluster, at the same place
__device__ __forceinline__ void load_panel_for_all(u32 target, const TensorMap* map, int channel, int row,
                                                   u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(target),
        "l"(map), "r"(channel), "r"(row), "r"(barrier), "h"((unsigned short)((1 << CLUSTER) - 1))
        : "memory");
}

#define P16_4 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define P16_5 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define P16_6 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define P16_7 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
// d = a b^T (+ d): 64 rows by 256 columns, channels of 32 bytes
__device__ __forceinline__ void multiply(float (&d)[COLUMNS], u64 a, u64 b, int add) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %130, 0;\n"
        "wgmma.mma_async.sync.aligned." PRODUCT " {" P16_0 ", " P16_1 ", " P16_2 ", " P16_3
        ", " P16_4 ", " P16_5 ", " P16_6 ", " P16_7 "}, %128, %129, p, 1, 1" TRANSPOSED "; }"
        : F16(d, 0), F16(d, 16), F16(d, 32), F16(d, 48), F16(d, 64), F16(d, 80), F16(d, 96), F16(d, 112)
        : "l"(a), "l"(b), "r"(add));
}

struct Ring {
    u32 slots, full, empty;
};

// `arrived`: how many clusters have loaded all of how many units, in sum. Clusters that drift apart load the same rows
// and weights at different times, when they have left the L2 cache: three times as much from memory in a wide layer.
__device__ __forceinline__ void wait_for_others(const int* arrived, int expected) {
    for (int i = 0; i < PATIENCE; i++) {
        int now;
        // with less than `acquire` the loop has no effect that the assembler would keep it for
        asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(now) : "l"(arrived) : "memory");
        if (now >= expected) return;
    }
}

__device__ __forceinline__ void produce(const Ring& ring, const TensorMap* x, const TensorMap* weight,
                                        const Shape& shape, int* arrived) {
    const u32 rank = cluster_rank();
    const int clusters = gridDim.x / CLUSTER;
    u32 slot = 0, turn = 1;
    int expected = 0;
#pragma unroll 1
    for (int unit = blockIdx.x / CLUSTER; unit < shape.units(); unit += clusters) {
        if (expected) wait_for_others(arrived, expected);
        expected += clusters;
        int row, column;
        shape.locate(unit, rank, row, column);
        const int weight_row = column + rank * shape.second_half;
#pragma unroll 1
        for (int channel = 0; channel < shape.depth; channel += DEPTH) {
            const u32 target = ring.slots + slot * SLOT_BYTES, barrier = ring.full + 8 * slot;
            barrier_wait(ring.empty + 8 * slot, turn);
            // a panel of the other block may be there first: the count of bytes may go below zero
            barrier_expect(barrier, SLOT_BYTES);
            load_panel(target, x, channel, row, barrier);
            load_panel_for_all(target + (1 + rank) * PANEL_BYTES, weight, channel, weight_row, barrier);
            if (++slot == STAGES) slot = 0, turn ^= 1;
        }
        if (rank == 0) asm volatile("red.relaxed.gpu.global.add.s32 [%0], 1;" ::"l"(arrived) : "memory");
    }
}

// `follow` takes a warpgroup's products of a unit: `prepare(row, column)` is called when there is nothing to do but to
// wait for the last of them, `finish(sums, row, column)` then. `row` is the warpgroup's first. A thread has two columns
// of every eight, from lane % 4 * 2 on, of the rows lane / 4 and lane / 4 + 8 of its warp's 16.
template <class Follow>
__device__ __forceinline__ void consume(const Ring& ring, const Shape& shape, int user, int lane, Follow& follow) {
    const int steps = shape.steps();
    const u32 rank = cluster_rank();
    u32 slot = 0, turn = 0;
    float sums[COLUMNS];
    const auto give_back = [&](u32 used) {
        if (lane < CLUSTER) barrier_arrive_at(ring.empty + 8 * used, lane);
    };
    if (user == 1) named_sync<256>(LAG_BARRIER);
    bool first = user == 0;
#pragma unroll 1
    for (int unit = blockIdx.x / CLUSTER; unit < shape.units(); unit += gridDim.x / CLUSTER) {
        u32 previous = 0;
#pragma unroll 1
        for (int step = 0; step < steps; step++) {
            // warp-uniform, so that descriptors stay in uniform registers
            const u32 low = __shfl_sync(~0u, ((ring.slots & 0x3ffff) + slot * SLOT_BYTES) >> 4, 0) | K_MAJOR;
            const u32 rows = low + user * (ROWS * ROW_BYTES >> 4), columns = low + (PANEL_BYTES >> 4);
            barrier_wait(ring.full + 8 * slot, turn);
            pin(sums);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < ROW_BYTES / 32; k++)
                multiply(sums, descriptor(rows + 2 * k), descriptor(columns + 2 * k), step + k);
            wgmma_commit();
            if (step) {
                wgmma_wait<1>();
                give_back(previous);
            }
            previous = slot;
            if (++slot == STAGES) slot = 0, turn ^= 1;
            if (first && step == LAG - 1) {
                asm volatile("bar.arrive %0, 256;" ::"n"(LAG_BARRIER) : "memory");
                first = false;
            }
        }
        int row, column;
        shape.locate(unit, rank, row, column);
        row += ROWS * user;
        follow.prepare(row, column);
        wgmma_wait<0>();
        pin(sums);
        give_back(previous);
        follow.finish(sums, row, column);
    }
}

// From the barriers' making to the end of both blocks; `barriers` lie behind all else in shared memory.
template <class Follow>
__device__ __forceinline__ void multiply_rows(u32 slots, u32 barriers, const TensorMap* x, const TensorMap* weight,
                                              const Shape& shape, int* arrived, Follow& follow) {
    const Ring ring = {slots, barriers, barriers + 8 * STAGES};
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(ring.full + 8 * i, 1);
            barrier_init(ring.empty + 8 * i, 4 * GROUP * CLUSTER);
        }
        asm volatile("fence.mbarrier_init.release.cluster;");
    }
    cluster_sync();
    if (warpgroup == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        if (threadIdx.x == 0) produce(ring, x, weight, shape, arrived);
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
        consume(ring, shape, warpgroup - 1, lane, follow);
        follow.out.end();
    }
    // the other block may still give slots of this one back
    cluster_sync();
}

// Where a warpgroup puts 64 rows by COLUMNS columns of results together before they are stored by TMA, which leaves out
// rows past the last one. Panels of 64 columns in rows of 128 bytes with the 128-byte swizzle.
struct Staging {
    const TensorMap* map;
    u32 base;
    int user, lane;

    __device__ __forceinline__ Staging(const TensorMap* map, u32 all) : map(map) {
        user = (int)threadIdx.x / 128 - 1;
        lane = threadIdx.x % 32;
        base = all + user * OUT_BYTES;
    }
    // until what was put before is read
    __device__ __forceinline__ void begin() const {
        if (threadIdx.x % 128 == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
        named_sync<128>(OUT_BARRIER + user);
    }
    // columns 8 * group to 8 * group + 15 of the warp's rows: word[j][r] has those of group + j in row 8 * r + lane / 4
    __device__ __forceinline__ void put(int group, const u32 (&word)[2][2]) const {
        const u32 row = base + (threadIdx.x % 128 / 32 * 16 + lane / 8 % 2 * 8 + lane % 8) * 128;
        const int own = group + lane / 16;
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                         row + own / 8 * (OUT_BYTES / 2) + ((own ^ lane) % 8) * 16),
                     "r"(word[0][0]), "r"(word[0][1]), "r"(word[1][0]), "r"(word[1][1])
                     : "memory");
    }
    __device__ __forceinline__ void store(int row, int column) const {
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        named_sync<128>(OUT_BARRIER + user);
        if (threadIdx.x % 128 == 0) {
#pragma unroll
            for (int panel = 0; panel < 2; panel++)
                asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map),
                             "r"(column + 64 * panel), "r"(row), "r"(base + panel * (OUT_BYTES / 2))
                             : "memory");
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        }
        __syncwarp();
    }
    // shared memory must last until it is read
    __device__ __forceinline__ void end() const {
        if (threadIdx.x % 128 == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
        __syncwarp();
    }
};

__device__ __forceinline__ u32 first_slot(const int* scratch) {
    u32 slots;
    // opaque to the compiler, which otherwise works the base out anew at every use
    asm volatile("mov.b32 %0, %1;" : "=r"(slots) : "r"((u32)__cvta_generic_to_shared(scratch) + 1023 & ~1023u));
    return slots;
}

__device__ __forceinline__ float gated(float value, float gate) {
    // the fast forms are exact to about 2^-21 of the result, far below a rounding to 16 bits; from gates below -87 on they
    // give 0
    return value * __fdividef(gate, 1.f + __expf(-gate));
}
