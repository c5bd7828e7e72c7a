// Block-sparse attention for sm_90a, compiled by NVRTC behind hopper_attention.cuh. Two kernels: `merge_lists` turns the key
// tiles of GROUP query tiles into one shared list, `attend` streams those tiles through shared memory past one
// warpgroup a query tile.
//
// A tile is ROWS x DIM bf16. One producer warp loads key and value tiles into a ring of STAGES slots by TMA. Each of
// GROUP consumer warpgroups holds its query tile as A fragments and its output in registers and computes, a tile at a
// time, scores = q k^T, a softmax step against a lazily moved reference, and out += p v. The three chains are
// independent, so that one's softmax runs under another's matrix products.
//
// The position of an entry in the stream of all entries that a block ever loads is its place. Place i uses slot
// i % STAGES and arrival barrier i % BARRIERS. Why there are more barriers than slots: a warpgroup that skips tiles
// of its neighbours does not see every use of a barrier, and a parity alone cannot tell a use from the one two before.
// A warpgroup never steps further than MAX_STEP = BARRIERS - STAGES (the list has entries that it only touches).
// Waiting for place X after place P, with X - P <= MAX_STEP: P was loaded only after P - STAGES >= X - BARRIERS, the
// barrier's previous use, had been given back by all, so that use is over and parity tells it from X.

constexpr int GROUP = 3, STAGES = 6, BARRIERS = 32, MAX_STEP = BARRIERS - STAGES;
constexpr int CONSUMER_REGISTERS = 160, PRODUCER_REGISTERS = 32;
constexpr int MERGE_THREADS = 256;
constexpr int NUM_CLASSES = (1 << GROUP) - 1;
// entries: shared list `tile | users << 16`; own list `step | step % STAGES << 8 | (valid - 1) << 16 | TOUCH`
constexpr int TOUCH = 1 << 24;
__device__ __forceinline__ int step_of(int entry) { return entry & 0xff; }
__device__ __forceinline__ int slots_of(int entry) { return entry >> 8 & 0xff; }
constexpr int TERMINATORS = 2;

// How the merged lists lie in memory. List 0 serves all groups of prefix query tiles, list 1 + head * video_groups + i
// the i-th group of the video query tiles of a head.
struct Plan {
    int *shared, *own, *lengths;  // lengths: (lists, 1 + GROUP), of the shared list and of each own list
    int num_tiles, num_prefix_tiles, prefix_groups, video_groups, shared_stride, own_stride;

    __device__ int groups() const { return prefix_groups + video_groups; }
    __device__ int list(int unit) const {
        int group = unit % groups(), head = unit / groups();
        return group < prefix_groups ? 0 : 1 + head * video_groups + group - prefix_groups;
    }
    __device__ int first_tile(int unit) const {
        int group = unit % groups();
        return group < prefix_groups ? group * GROUP : num_prefix_tiles + (group - prefix_groups) * GROUP;
    }
    __device__ int end_tile(int unit) const { return unit % groups() < prefix_groups ? num_prefix_tiles : num_tiles; }
    // whether no query tile of the unit has rows: only tiles of the prefix are ever empty
    __device__ bool is_empty(int unit, const int* sizes) const {
        if (unit % groups() >= prefix_groups) return false;
        int rows = 0;
        for (int tile = first_tile(unit); tile < min(first_tile(unit) + GROUP, num_prefix_tiles); tile++)
            rows += sizes[tile];
        return rows == 0;
    }
    // the list of the prefix is as long as can be, all others have the strides
    __device__ int* shared_list(int list) const {
        return list ? shared + num_tiles + (i64)(list - 1) * shared_stride : shared;
    }
    __device__ int* own_list(int list, int user) const {
        int first = num_tiles + TERMINATORS;
        return list ? own + (i64)GROUP * first + ((i64)(list - 1) * GROUP + user) * own_stride
                    : own + user * first;
    }
};

// One tile: 64 rows of 2 panels of 64 columns, each panel in rows of 128 bytes with the 128-byte swizzle.
__device__ __forceinline__ void load_tile(u32 target, const TensorMap* map, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::
            "r"(target),
        "l"(map), "r"(0), "r"(row), "r"(0), "r"(barrier)
        : "memory");
}

// ---- attention

struct Ring {
    u32 slots, full, empty;
    __device__ u32 full_of(u32 place) const { return full + 8 * (place % BARRIERS); }
};

// A warpgroup's walk along its own list. Entries are fetched two ahead, and slot and barriers of the next entry are
// worked out while products run.
struct Walk {
    const Ring& ring;
    const int* list;
    u32 place, slot;
    int entry, following;
    u32 low, full, empty, parity;

    __device__ __forceinline__ Walk(const Ring& ring) : ring(ring), place(~0u), slot(STAGES - 1) {}
    __device__ __forceinline__ void begin(const int* own) {
        list = own + TERMINATORS;
        entry = own[0];
        following = own[1];
        locate();
    }
    __device__ __forceinline__ void advance() {
        entry = following;
        following = *list++;
        locate();
    }
    __device__ __forceinline__ void locate() {
        place += step_of(entry);
        slot += slots_of(entry);
        slot -= slot >= STAGES ? STAGES : 0;
        parity = place / BARRIERS & 1;
        full = ring.full_of(place);
        empty = ring.empty + 8 * slot;
        // warp-uniform, so that descriptors stay in uniform registers
        low = __shfl_sync(~0u, ((ring.slots & 0x3ffff) + slot * SLOT_BYTES) >> 4, 0);
    }
};

__device__ __forceinline__ void produce(const Ring& ring, const TensorMap* keys, const TensorMap* values,
                                        const int* sizes, const int* units, int max_units, const Plan& plan,
                                        int lane) {
    u32 slot = 0, parity = 1, place = 0;
#pragma unroll 1
    for (int u = 0; u < max_units && units[u] >= 0; u++) {
        if (plan.is_empty(units[u], sizes)) continue;
        const int list = plan.list(units[u]), length = plan.lengths[list * (1 + GROUP)];
        const int first_row = units[u] / plan.groups() * plan.num_tiles * ROWS;
        const int* entries = plan.shared_list(list);
        int next = lane < length ? entries[lane] : 0;
#pragma unroll 1
        for (int base = 0; base < length; base += 32) {
            const int current = next, count = min(32, length - base);
            next = base + 32 + lane < length ? entries[base + 32 + lane] : 0;
#pragma unroll 1
            for (int i = 0; i < count; i++) {
                const int entry = __shfl_sync(~0u, current, i);
                if (lane == 0) {
                    const u32 empty = ring.empty + 8 * slot, full = ring.full_of(place);
                    const u32 target = ring.slots + slot * SLOT_BYTES;
                    barrier_wait(empty, parity);
                    barrier_expect(full, SLOT_BYTES);
                    const int row = first_row + (entry & 0xffff) * ROWS;
                    load_tile(target, keys, row, full);
                    load_tile(target + TILE_BYTES, values, row, full);
                    const int absent = GROUP - __popc(entry >> 16);
                    if (absent) barrier_arrive(empty, 4 * absent);
                }
                place++;
                if (++slot == STAGES) {
                    slot = 0;
                    parity ^= 1;
                }
            }
        }
    }
}

__device__ __forceinline__ void consume(const Ring& ring, const u32* queries, u32* outputs, const int* sizes,
                                        float log2_scale, const int* units, int max_units, const Plan& plan, int user,
                                        int lane) {
    Walk walk(ring);
    Rows rows;
    // in words of two channels, within a tile
    const int at = (threadIdx.x % 128 / 32 * 16 + lane / 4) * (DIM / 2) + lane % 4;
#pragma unroll 1
    for (int u = 0; u < max_units && units[u] >= 0; u++) {
        if (plan.is_empty(units[u], sizes)) continue;
        const int list = plan.list(units[u]), head = units[u] / plan.groups();
        const int tile = plan.first_tile(units[u]) + user;
        const bool present = tile < plan.end_tile(units[u]);
        const i64 offset = ((i64)head * plan.num_tiles + (present ? tile : 0)) * (ROWS * DIM / 2) + at;
        const int spare = (present ? sizes[tile] : 0) - at / (DIM / 2);
        const u32 *low = queries + offset, *high = low + 8 * DIM / 2;
#pragma unroll
        for (int k = 0; k < DIM / 16; k++) {
            rows.q[k][0] = low[k * 8];
            rows.q[k][1] = high[k * 8];
            rows.q[k][2] = low[k * 8 + 4];
            rows.q[k][3] = high[k * 8 + 4];
        }
        begin_rows(rows, spare, log2_scale);

        const int length = plan.lengths[list * (1 + GROUP) + 1 + user];
        walk.begin(plan.own_list(list, user));
#pragma unroll 1
        for (int j = 0; j < length; j++) {
            const u32 empty = walk.empty;
            barrier_wait(walk.full, walk.parity);
            // most tiles are whole and its own: one comparison
            const u32 low = walk.low;
            const int what = walk.entry >> 16;
            const auto advance = [&] { walk.advance(); };
            if (what == ROWS - 1) {
                attend_tile<64, false, 4>(rows, low, 64, log2_scale, lane, advance);
            } else if (walk.entry & TOUCH) {
                walk.advance();
            } else if (what < 16) {
                attend_tile<16, true, 1>(rows, low, what + 1, log2_scale, lane, advance);
            } else if (what < 32) {
                attend_tile<32, true, 2>(rows, low, what + 1, log2_scale, lane, advance);
            } else {
                attend_tile<64, true, 4>(rows, low, what + 1, log2_scale, lane, advance);
            }
            barrier_arrive_if(empty, lane == 0);
        }

        float inverse[2];
        finish_rows(rows, inverse);
        if (present) {
            u32* out = outputs + offset;
#pragma unroll
            for (int i = 0; i < DIM / 8; i++) {
                out[i * 4] = pack(rows.out[4 * i] * inverse[0], rows.out[4 * i + 1] * inverse[0]);
                out[i * 4 + 8 * DIM / 2] = pack(rows.out[4 * i + 2] * inverse[1], rows.out[4 * i + 3] * inverse[1]);
            }
        }
    }
}

// q, out: (heads, tiles, ROWS, DIM) bf16. sizes: valid rows of every tile, none for tiles of the prefix that are left
// out; the other rows of out become 0, those of a unit without rows are not written. units: (blocks, max_units), the
// (head, group) pairs of each block, -1 ends.
extern "C" __global__ void __launch_bounds__(128 * (1 + GROUP), 1)
    attend(const __grid_constant__ TensorMap keys, const __grid_constant__ TensorMap values, const u32* queries,
           u32* outputs, const int* sizes, const int* units, int max_units, float log2_scale,
           const __grid_constant__ Plan plan) {
    extern __shared__ int scratch[];
    Ring ring;
    // opaque to the compiler, which otherwise works the base out anew at every use
    asm volatile("mov.b32 %0, %1;" : "=r"(ring.slots) : "r"((u32)__cvta_generic_to_shared(scratch) + 1023 & ~1023u));
    ring.full = ring.slots + STAGES * SLOT_BYTES;
    ring.empty = ring.full + 8 * BARRIERS;
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < BARRIERS; i++) barrier_init(ring.full + 8 * i, 1);
        for (int i = 0; i < STAGES; i++) barrier_init(ring.empty + 8 * i, 4 * GROUP);
        asm volatile("fence.mbarrier_init.release.cluster;");
    }
    __syncthreads();
    units += blockIdx.x * max_units;
    if (warpgroup == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        if (threadIdx.x < 32) produce(ring, &keys, &values, sizes, units, max_units, plan, lane);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
        consume(ring, queries, outputs, sizes, log2_scale, units, max_units, plan, warpgroup - 1, lane);
    }
}

// ---- lists

// selected: (heads, video query tiles, max_selected) key tiles, of which the first counts[...] count; sizes: valid rows
// of every tile; up to 4,096 tiles. One block a list, 8 bytes of shared memory a tile. Entries out of range are dropped
// and doubled ones taken once.
//
// Order of a shared list: tiles fall into classes by the subset of query tiles that use them. Every class is in
// ascending order and spread evenly over the list, so that the warpgroups advance alike and all blocks sweep the keys
// of a head in step: the i-th of m elements of a class stands at (i + 1/2) / m, of equal ones the lower class first.
extern "C" __global__ void __launch_bounds__(MERGE_THREADS)
    merge_lists(const int* __restrict__ selected, const int* __restrict__ counts, const int* __restrict__ sizes,
                int max_selected, const __grid_constant__ Plan plan) {
    extern __shared__ int scratch[];
    // by_class: tile | class << 16, class after class; merged: tile | users << 16 | (valid - 1) << 24
    int *users = scratch, *by_class = scratch + plan.num_tiles, *merged = users;
    __shared__ u64 warp_totals[2][MERGE_THREADS / 32];
    __shared__ u32 class_size[NUM_CLASSES], class_begin[NUM_CLASSES], reciprocal_low[NUM_CLASSES],
        reciprocal_high[NUM_CLASSES];
    const int list = blockIdx.x, thread = threadIdx.x, lane = thread % 32, warp = thread / 32, n = plan.num_tiles;
    const int head = (list - 1) / max(plan.video_groups, 1), group = (list - 1) % max(plan.video_groups, 1);
    const int first = group * GROUP, video = n - plan.num_prefix_tiles;
    const int present = list ? min(GROUP, video - first) : GROUP, everybody = (1 << present) - 1;

    for (int i = thread; i < n; i += MERGE_THREADS)
        users[i] = (!list || i < plan.num_prefix_tiles) && sizes[i] ? everybody : 0;
    __syncthreads();
    const i64 query = (i64)head * video + first;
    int listed[GROUP];
#pragma unroll
    for (int user = 0; user < GROUP; user++)
        listed[user] = list && user < present ? min(counts[query + user], max_selected) : 0;
    for (int i = thread; i < max_selected; i += MERGE_THREADS) {
        int tile[GROUP];
#pragma unroll
        for (int user = 0; user < GROUP; user++)
            tile[user] = i < listed[user] ? selected[(query + user) * max_selected + i] : -1;
#pragma unroll
        for (int user = 0; user < GROUP; user++)
            if (0 <= tile[user] && tile[user] < n) atomicOr(&users[tile[user]], 1 << user);
    }
    __syncthreads();

    // how many tiles of each class come before this thread's share of them: counters of 16 bits, class c in word c / 4
    const int share = (n + MERGE_THREADS - 1) / MERGE_THREADS, begin = thread * share, end = min(n, begin + share);
    u64 own[2] = {0, 0}, before[2];
    for (int i = begin; i < end; i++) {
        const int c = users[i] - 1;
        own[0] += 0 <= c && c < 4 ? 1ull << c * 16 : 0;
        own[1] += c >= 4 ? 1ull << (c - 4) * 16 : 0;
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        u64 sum = own[half];
        for (int distance = 1; distance < 32; distance *= 2) {
            const u64 other = __shfl_up_sync(~0u, sum, distance);
            if (lane >= distance) sum += other;
        }
        if (lane == 31) warp_totals[half][warp] = sum;
        before[half] = sum - own[half];
    }
    __syncthreads();
    if (warp == 0) {
        const int c = lane;
        u32 size = 0;
        if (c < NUM_CLASSES)
            for (int i = 0; i < MERGE_THREADS / 32; i++) size += warp_totals[c / 4][i] >> c % 4 * 16 & 0xffff;
        u32 sum = size;
        for (int distance = 1; distance < 8; distance *= 2) {
            const u32 other = __shfl_up_sync(~0u, sum, distance);
            if (lane >= distance) sum += other;
        }
        if (c < NUM_CLASSES) {
            // x / d = x * ceil(2^38 / d) >> 38 for x < 2^26 and d <= 2^12
            const u64 reciprocal = size ? ((1ull << 38) + size - 1) / size : 0;
            class_size[c] = size;
            class_begin[c] = sum - size;
            reciprocal_low[c] = (u32)reciprocal;
            reciprocal_high[c] = (u32)(reciprocal >> 32);
        }
    }
#pragma unroll
    for (int half = 0; half < 2; half++)
        for (int i = 0; i < warp; i++) before[half] += warp_totals[half][i];
    __syncthreads();
    for (int i = begin; i < end; i++) {
        const int c = users[i] - 1;
        if (c < 0) continue;
        const int shift = c % 4 * 16;
        by_class[class_begin[c] + ((c < 4 ? before[0] : before[1]) >> shift & 0xffff)] = i | c << 16;
        before[0] += c < 4 ? 1ull << shift : 0;
        before[1] += c >= 4 ? 1ull << shift : 0;
    }
    const int length = class_begin[NUM_CLASSES - 1] + class_size[NUM_CLASSES - 1];
    __syncthreads();

    for (int i = thread; i < length; i += MERGE_THREADS) {
        const int entry = by_class[i], tile = entry & 0xffff, mine = entry >> 16;
        const u32 low = reciprocal_low[mine], high = reciprocal_high[mine], twice = 2 * (i - class_begin[mine]) + 1;
        u32 position = 0;
        // of every class, its own included, the elements (j + 1/2) / size[c] before (rank + 1/2) / size[mine]
#pragma unroll
        for (int c = 0; c < NUM_CLASSES; c++) {
            const u32 scaled = twice * class_size[c] - (c < mine ? 0 : 1);
            const u32 quotient = __umulhi(scaled, low) + scaled * high >> 6;
            position += min(class_size[c], (quotient + 1) / 2);
        }
        merged[position] = tile | mine + 1 << 16 | (sizes[tile] - 1 & 63) << 24;
    }
    __syncthreads();

    if (warp < GROUP) {
        int* target = plan.own_list(list, warp);
        int written = 0, last_used = -1, last = -1;
        for (int base = 0; base < length; base += 32) {
            const int at = base + lane, entry = at < length ? merged[at] : 0;
            const u32 earlier = (1u << lane) - 1;
            const bool used = entry >> 16 >> warp & 1;
            const u32 all_used = __ballot_sync(~0u, used), used_before = all_used & earlier;
            const int since = at - (used_before ? base + 31 - __clz(used_before) : last_used);
            const bool touched = !used && at < length && (since % MAX_STEP == 0 || at == length - 1);
            const u32 all_seen = __ballot_sync(~0u, used || touched), seen_before = all_seen & earlier;
            if (used || touched) {
                const int step = at - (seen_before ? base + 31 - __clz(seen_before) : last);
                target[written + __popc(seen_before)] =
                    step | step % STAGES << 8 | (entry >> 24 & 63) << 16 | (touched ? TOUCH : 0);
                if (touched) atomicOr(&merged[at], 1 << 16 + warp);
            }
            written += __popc(all_seen);
            if (all_used) last_used = base + 31 - __clz(all_used);
            if (all_seen) last = base + 31 - __clz(all_seen);
        }
        if (lane < TERMINATORS) target[written + lane] = 0;
        if (lane == 0) plan.lengths[list * (1 + GROUP) + 1 + warp] = written;
    }
    __syncthreads();
    int* target = plan.shared_list(list);
    for (int i = thread; i < length; i += MERGE_THREADS) target[i] = merged[i] & 0x7ffff;
    if (thread == 0) plan.lengths[list * (1 + GROUP)] = length;
}
