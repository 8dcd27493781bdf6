// Products of weights in float4_e2m1 with at most eight rows of inputs in bfloat16 at a time: a
// layer's own, or those of the pairs of a token and an expert that share an expert.
//
// A block of threads stays and goes from item to item: the rows of one weight, all columns, times
// one block of inputs. One warp brings the next item's codes and scales to shared memory in bulk
// copies while eight warps multiply the present one's. Each of them has a part of the columns
// (ACROSS) or of the rows, and multiplies on tensor cores, 16 rows by 16 columns by eight inputs. In
// which order columns are added up is free, so each thread takes 32 that lie side by side: their
// codes are one load of 16 bytes, and their two scales are needed by no other thread.
//
// Sums are in float32 and in a fixed order, and a row of inputs has the same bits in whatever place
// of a block it is.
//
// Compiled by kernels/cuda.py for the shapes of a weight; launched by fp4_few.py.
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef unsigned long long u64;
typedef long long i64;

constexpr int WARPS = 8;  // that multiply
constexpr int CONSUMERS = 32 * WARPS;
constexpr int INPUTS = 8;   // rows of a block
constexpr int STEP = 128;   // columns that a warp takes at a time: 32 a thread, four threads a row
constexpr int STAGES = 2;   // items in shared memory
constexpr int NOTES = 2 * STAGES;  // whose inputs are noted: some threads still read the last item's

// What is computed: y = W x; act(W x), of pairs, perhaps times a second half of the rows; a share of
// W x, of pairs.
enum Kind { PLAIN, UP, DOWN };
enum Activation { NONE, SILU, RELU2 };

__device__ __forceinline__ u32 times(u32 a, u32 b) {
    u32 product;
    asm("mul.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

// A scale's byte, float8_e4m3fn -> bfloat16 twice, 2^119 times as large: its exponent and mantissa in
// a bfloat16's places mean 2^-120 of it.
__device__ __forceinline__ u32 lifted(u32 scale) {
    return times(times(scale * 0x00100010u, 0x7F007F00u), 0x77807780u);
}

// Eight codes (formats.FP4_PLACES) -> bfloat16: columns 0 and 1, 2 and 3, 8 and 9, 10 and 11. In a
// bfloat16's places they mean 2^-126 of what they stand for; with a lifted scale the products are
// 2^-7 of the weights, and exact.
struct Weights { u32 first, second, third, fourth; };
__device__ __forceinline__ Weights unpacked(u32 codes, u32 scale) {
    const u32 both = 0x81C081C0u, magnitudes = 0x01C001C0u, signs = 0x80008000u;
    return {
        times(codes & both, scale),
        times(((codes << 6) & magnitudes) | ((codes << 1) & signs), scale),
        times((codes << 3) & both, scale),
        times(((codes >> 3) & magnitudes) | ((codes << 2) & signs), scale),
    };
}

// total [16 rows, 8 inputs] += a [16, 16] b [16, 8]
__device__ __forceinline__ void multiply(
    float (&total)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(total[0]), "+f"(total[1]), "+f"(total[2]), "+f"(total[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u16 rounded(float value) {
    u16 result;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result) : "f"(value));
    return result;
}

template <int ACTIVATION>
__device__ __forceinline__ float activated(float x) {
    if (ACTIVATION == SILU) return x / (1.0f + __expf(-x));
    if (ACTIVATION == RELU2) return fmaxf(x, 0.0f) * fmaxf(x, 0.0f);
    return x;
}

__device__ __forceinline__ u32 place(const void* shared) {
    return (u32)__cvta_generic_to_shared(shared);
}

__device__ __forceinline__ void initialize(u64* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(place(barrier)), "r"(arrivals));
}

__device__ __forceinline__ void arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(place(barrier)) : "memory");
}

__device__ __forceinline__ void arrive_and_expect(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 ::"r"(place(barrier)), "r"(bytes) : "memory");
}

__device__ __forceinline__ void wait(u64* barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra ready;\nbra again;\nready:\n}" ::"r"(place(barrier)), "r"(parity) : "memory");
}

__device__ __forceinline__ void wait_for_consumers() {
    asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
}

__device__ __forceinline__ void copy(u32 target, const void* source, u32 bytes, u64* barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        ::"r"(target), "l"(source), "r"(bytes), "r"(place(barrier)) : "memory");
}

__device__ __forceinline__ uint4 codes_at(u32 address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
    return v;
}

__device__ __forceinline__ u32 scales_at(u32 address) {
    u16 v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address));
    return v;
}

// x [.., COLUMNS] bfloat16; weight [experts, OUTPUTS (twice where GATED), COLUMNS] as codes, scales of
// 16 columns and of rows. OUTPUTS is a multiple of 16, COLUMNS of 32.
// A block's inputs: of PLAIN, rows of x; where PAIRS, one pair, with experts [pairs]; otherwise
// `slots` of `group`. Of UP, x has a row for each token, and pair p is of token p / chosen; of DOWN a
// row for each pair.
// out [rows or pairs, OUTPUTS] bfloat16. Of DOWN instead parts [pairs, OUTPUTS] float32, and where
// PAIRS out [tokens, OUTPUTS], their sums, with `counter`, zeros that are left as zeros.
template <int ACROSS, int KIND, bool PAIRS, bool GATED, int ACTIVATION, int COLUMNS, int OUTPUTS>
__global__ void __launch_bounds__(CONSUMERS + 32, 2) product(
    const u16* __restrict__ x, const u8* __restrict__ weight, const u8* __restrict__ scale,
    const float* __restrict__ row_scale, const int* __restrict__ experts,
    const int* __restrict__ slots, const float* __restrict__ shares, u16* __restrict__ out,
    float* parts, int* counter, int chosen, int num_experts, int num_blocks, int num_rows) {
    constexpr int BELOW = WARPS / ACROSS;   // warps that have other rows
    constexpr int OWN = GATED ? 16 : 32;    // rows of the result of a warp
    constexpr int ROWS = OWN * BELOW;       // of an item
    constexpr int PIECES = 2 * BELOW;       // of 16 rows of the weight, in an item
    constexpr int TILES = (OUTPUTS + ROWS - 1) / ROWS;
    constexpr int STEPS = (COLUMNS + STEP - 1) / STEP, EACH = (STEPS + ACROSS - 1) / ACROSS;
    constexpr int CODES = COLUMNS / 2, SCALES = COLUMNS / 16;  // bytes of a row
    constexpr int SCALES_AT = PIECES * 16 * CODES, ROW_SCALES_AT = SCALES_AT + PIECES * 16 * SCALES;
    constexpr int STAGE = ROW_SCALES_AT + PIECES * 64;  // bytes
    __shared__ float sums[2][ACROSS][BELOW][32][INPUTS + 2];
    __shared__ bool is_last;
    __shared__ int counts[NOTES], pairs[NOTES][INPUTS];
    __shared__ float pair_shares[NOTES][INPUTS];
    __shared__ u64 full[STAGES], empty[STAGES];
    extern __shared__ __align__(128) u8 memory[];

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const bool in_groups = KIND != PLAIN && !PAIRS;
    const int blocks = in_groups ? __ldg(slots + num_blocks * (INPUTS + 1)) : num_blocks;
    const int items = blocks * TILES;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            initialize(full + i, 1);
            initialize(empty + i, WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();

    // The row or pair in a place of a block; -1: none.
    auto input_at = [&](int block, int i) {
        if (in_groups) return __ldg(slots + block * INPUTS + i);
        if (PAIRS) return i == 0 ? block : -1;
        return block * INPUTS + i < num_rows ? block * INPUTS + i : -1;
    };

    if (warp == WARPS) {
        int turn = 0;
        for (int item = blockIdx.x; item < items; item += gridDim.x, ++turn) {
            const int stage = turn % STAGES, note = turn % NOTES;
            const int block = item / TILES, first = item % TILES * ROWS;
            int expert = 0;
            if (KIND != PLAIN) expert = __ldg(PAIRS ? experts + block : slots + num_blocks * INPUTS + block);
            int pair = lane < INPUTS ? input_at(block, lane) : -1;
            if (expert >= num_experts) {  // on another rank: nothing of it counts
                expert = 0;
                pair = -1;
            }
            const float share = KIND == DOWN && pair >= 0 ? __ldg(shares + pair) : 0.0f;
            const int count = __popc(__ballot_sync(~0u, pair >= 0));
            if (turn >= STAGES) wait(empty + stage, (turn / STAGES - 1) % 2);
            if (lane < INPUTS) {
                pairs[note][lane] = pair;
                pair_shares[note][lane] = share;
            }
            if (lane == 0) counts[note] = count;
            __syncwarp();
            const int n = first + (GATED ? lane / 2 : lane) * 16;
            const bool copies = lane < PIECES && n < OUTPUTS;
            const int pieces = __popc(__ballot_sync(~0u, copies));
            if (lane == 0) arrive_and_expect(full + stage, pieces * (16 * (CODES + SCALES) + 64));
            __syncwarp();
            if (copies) {
                const i64 row = (i64)expert * (OUTPUTS * (GATED ? 2 : 1)) + n + (GATED ? lane % 2 * OUTPUTS : 0);
                const u32 target = place(memory) + stage * STAGE;
                copy(target + lane * 16 * CODES, weight + row * CODES, 16 * CODES, full + stage);
                copy(target + SCALES_AT + lane * 16 * SCALES, scale + row * SCALES, 16 * SCALES, full + stage);
                copy(target + ROW_SCALES_AT + lane * 64, row_scale + row, 64, full + stage);
            }
        }
        return;
    }

    const int g = lane / 4, t = lane % 4;
    const int across = warp % ACROSS, below = warp / ACROSS;
    const int begin = across * EACH;
    auto inputs_of = [&](int item) {
        const int pair = item < items ? input_at(item / TILES, g) : -1;
        const i64 row = KIND == UP ? pair / chosen : pair;
        return pair >= 0 ? x + row * COLUMNS + t * 32 : (const u16*)nullptr;
    };
    auto is_inside = [&](int step) { return COLUMNS % STEP == 0 || step * STEP + t * 32 < COLUMNS; };
    auto load = [&](const u16* source, int step, uint4 (&values)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            values[i] = make_uint4(0, 0, 0, 0);
            if (source && step < STEPS && is_inside(step))
                values[i] = __ldg((const uint4*)(source + step * STEP + i * 8));
        }
    };
    const u16* source = inputs_of(blockIdx.x);
    uint4 values[4], ahead[4];
    load(source, begin, ahead);
    int turn = 0;
    for (int item = blockIdx.x; item < items; item += gridDim.x, ++turn) {
        const int stage = turn % STAGES, note = turn % NOTES;
        const u16* next = inputs_of(item + gridDim.x);
        const u32 weights = place(memory) + stage * STAGE;
        const u32 codes = weights + (below * 32 + g) * CODES + t * 16;
        const u32 scales = weights + SCALES_AT + (below * 32 + g) * SCALES + t * 2;
        float total[2][4] = {};
        wait(full + stage, turn / STAGES % 2);
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int step = begin + i;
#pragma unroll
            for (int k = 0; k < 4; ++k) values[k] = ahead[k];
            if (i + 1 < EACH) load(source, step + 1, ahead);
            else load(next, begin, ahead);
            if (STEPS % ACROSS != 0 && step >= STEPS) continue;
#pragma unroll
            for (int m = 0; m < 2; ++m) {  // 16 rows each: g and g + 8 are this thread's
                uint4 w[2] = {};
                u32 s[2] = {};
                if (is_inside(step)) {
#pragma unroll
                    for (int k = 0; k < 2; ++k) {
                        w[k] = codes_at(codes + (m * 16 + k * 8) * CODES + step * (STEP / 2));
                        s[k] = scales_at(scales + (m * 16 + k * 8) * SCALES + step * (STEP / 16));
                    }
                }
#pragma unroll
                for (int chunk = 0; chunk < 2; ++chunk) {
                    const u32 upper = lifted(chunk ? s[0] >> 8 : s[0] & 255);
                    const u32 lower = lifted(chunk ? s[1] >> 8 : s[1] & 255);
                    const uint4 low = values[2 * chunk], high = values[2 * chunk + 1];
                    const Weights a = unpacked(chunk ? w[0].z : w[0].x, upper);
                    const Weights b = unpacked(chunk ? w[1].z : w[1].x, lower);
                    multiply(total[m], a.first, b.first, a.second, b.second, low.x, low.y);
                    multiply(total[m], a.third, b.third, a.fourth, b.fourth, high.x, high.y);
                    const Weights c = unpacked(chunk ? w[0].w : w[0].y, upper);
                    const Weights d = unpacked(chunk ? w[1].w : w[1].y, lower);
                    multiply(total[m], c.first, d.first, c.second, d.second, low.z, low.w);
                    multiply(total[m], c.third, d.third, c.fourth, d.fourth, high.z, high.w);
                }
            }
        }
        source = next;

        // The parts of the columns are added up in their order.
        auto& own = sums[turn % 2];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            *(float2*)&own[across][below][m * 16 + g][2 * t] = make_float2(total[m][0], total[m][1]);
            *(float2*)&own[across][below][m * 16 + g + 8][2 * t] = make_float2(total[m][2], total[m][3]);
        }
        wait_for_consumers();
        const int first = item % TILES * ROWS, count = counts[note];
        const float* row_scales = (const float*)(memory + stage * STAGE + ROW_SCALES_AT);
#pragma unroll
        for (int i = 0; i < (ROWS * INPUTS + CONSUMERS - 1) / CONSUMERS; ++i) {
            const int at = i * CONSUMERS + threadIdx.x;
            const int r = at % ROWS, input = at / ROWS, n = first + r;
            if (input >= count || (OUTPUTS % ROWS != 0 && n >= OUTPUTS)) continue;
            float value = 0.0f, other = 0.0f;
#pragma unroll
            for (int k = 0; k < ACROSS; ++k) {
                value += own[k][r / OWN][r % OWN][input];
                if (GATED) other += own[k][r / OWN][16 + r % OWN][input];
            }
            value *= 128.0f * row_scales[GATED ? r / 16 * 32 + r % 16 : r];
            const i64 pair = pairs[note][input];
            if (KIND == DOWN) {
                parts[pair * OUTPUTS + n] = value * pair_shares[note][input];
            } else {
                value = activated<ACTIVATION>(value);
                if (GATED) value *= other * 128.0f * row_scales[r / 16 * 32 + 16 + r % 16];
                out[pair * OUTPUTS + n] = rounded(value);
            }
        }
        __syncwarp();
        if (lane == 0) arrive(empty + stage);
        if (KIND == DOWN && PAIRS) {  // a token's last pair adds up all of them, in their order
            __threadfence();
            wait_for_consumers();
            const int token = item / TILES / chosen;
            if (threadIdx.x == 0) {
                int* done = counter + token * TILES + item % TILES;
                is_last = atomicAdd(done, 1) == chosen - 1;
                if (is_last) *done = 0;
            }
            wait_for_consumers();
            if (is_last) {
                __threadfence();
                for (int n = first + threadIdx.x; n < min(first + ROWS, OUTPUTS); n += CONSUMERS) {
                    float value = 0.0f;
                    for (int pair = token * chosen; pair < (token + 1) * chosen; ++pair)
                        if (__ldg(experts + pair) < num_experts)
                            value += __ldcg(parts + (i64)pair * OUTPUTS + n);
                    out[(i64)token * OUTPUTS + n] = rounded(value);
                }
            }
        }
    }
}

// experts [num_pairs] -> slots: of each block of at most INPUTS pairs that share an expert, these
// pairs, then -1; then the blocks' experts [num_blocks], then how many blocks there are. Pairs of ids
// past the last expert are in none. One block of threads; at most 1,024 experts.
__global__ void __launch_bounds__(1024) group(
    const int* __restrict__ experts, int* slots, int num_pairs, int num_experts, int num_blocks) {
    __shared__ int counts[1024];
    __shared__ int before[32];
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    counts[thread] = 0;
    __syncthreads();
    for (int pair = thread; pair < num_pairs; pair += 1024) {
        const int expert = __ldg(experts + pair);
        if (expert < num_experts) atomicAdd(&counts[expert], 1);
    }
    __syncthreads();
    const int own = counts[thread], blocks = (own + INPUTS - 1) / INPUTS;
    auto sum_up = [&](int sum) {  // over the lanes up to this one
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const int other = __shfl_up_sync(~0u, sum, distance);
            if (lane >= distance) sum += other;
        }
        return sum;
    };
    const int sum = sum_up(blocks);
    if (lane == 31) before[warp] = sum;
    __syncthreads();
    if (warp == 0) {
        const int mine = before[lane], total = sum_up(mine);
        before[lane] = total - mine;
        if (lane == 31) slots[num_blocks * (INPUTS + 1)] = total;
    }
    __syncthreads();
    const int first = before[warp] + sum - blocks;
    for (int i = 0; i < blocks; ++i) slots[num_blocks * INPUTS + first + i] = thread;
    for (int i = own; i < blocks * INPUTS; ++i) slots[first * INPUTS + i] = -1;
    counts[thread] = first * INPUTS;
    __syncthreads();
    for (int pair = thread; pair < num_pairs; pair += 1024) {
        const int expert = __ldg(experts + pair);
        if (expert < num_experts) slots[atomicAdd(&counts[expert], 1)] = pair;
    }
}
