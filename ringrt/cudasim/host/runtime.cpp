// The CUDA simulator's runtime: every CUDA thread of a block is a fiber, all on one thread of the
// host; blocks run one after the other.
//
// Kernels are compiled with -fsanitize=thread, of which only the calls are used: before every
// access to memory that is not a register the compiler calls __tsan_readN or __tsan_writeN, which
// are defined here. So each access is checked against the buffers the kernel was given, and
// each access to shared memory against what other threads did there since the last barrier.
//
// What a warp does together (shuffles, ldmatrix, mma) is a rendezvous of its 32 fibers, carried
// out by the last to come.
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <vector>
typedef unsigned short u16;
typedef unsigned int u32;
struct bf16 { u16 bits; };
struct f16 { u16 bits; };
struct alignas(16) Vec16 { u32 x[4]; };
#include "cudasim.h"
#include "fibers.h"
#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim

namespace cudasim {
namespace {

const unsigned WARP = 32;
const unsigned MAX_SHARED = 227 << 10;  // what a block may have on sm_90
const size_t STACK = 128 << 10;

struct Cell;
struct Owned;
struct Buffer { uintptr_t begin; uint64_t bytes; int writable; const char* name; Owned* owned; };
struct Copy { unsigned char* to; const unsigned char* from; bool ok; };
struct CopyGroup { std::vector<Copy> copies; };

struct Thread {
    void* sp;
    unsigned char* stack;
    bool done;
    const u32* waits_on;  // blocked while *waits_on == waits_value
    u32 waits_value;
    const char* at;       // what it is blocked in
    u32 turn;             // how many collectives of its warp it has joined
    u32 warp_epoch;       // how many __syncwarp
    std::vector<CopyGroup> groups;
};

struct Warp {
    u32 generation, arrived;
    const char* op;
    // Two sets in turn: a lane may be one collective ahead of one that has not read its result.
    uint64_t in[2][WARP][4], out[2][WARP][4];
    const void* row[2][WARP];
};

// Which threads touched a few bytes last. Threads are numbered from 1.
struct Cell {
    u32 write_epoch, read_epoch;
    u16 writer, write_warp_epoch;
    u16 reader, read_warp_epoch;  // reader: with LANES if others of its warp read too, or MANY
    u16 pending;                  // the thread whose asynchronous copy is under way
};
const u16 MANY = 0xffff, LANES = 0x8000;
// The like for memory that a kernel writes, with the block that owns it.
struct Owned { u32 block; Cell cell; };

std::vector<Thread> threads;
std::vector<Warp> warps;
std::vector<Buffer> buffers;
std::vector<Cell> cells;
std::vector<std::vector<Owned>> owned;
unsigned char shared[MAX_SHARED + 1024] __attribute__((aligned(1024)));
unsigned shared_bytes, count, current, alive;
u32 epoch, block_barrier, block_arrived, block_number;
dim3 block, grid, here;
void* scheduler;
void (*body)(void**);
void* arguments[64];
char* error_text;
int error_size;
bool failed;
float halves[1 << 16];

[[noreturn]] void fault(const char* format, ...) {
    char text[400];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    snprintf(error_text, error_size, "block (%u, %u, %u) thread %u: %s", here.x, here.y, here.z, current, text);
    failed = true;
    switch_to(&threads[current].sp, scheduler);
    abort();  // it is never resumed
}

void block_on(const u32* flag, u32 value, const char* at) {
    Thread& t = threads[current];
    t.waits_on = flag, t.waits_value = value, t.at = at;
    switch_to(&t.sp, scheduler);
}

Warp& my_warp() { return warps[current / WARP]; }
unsigned lane() { return current % WARP; }

// Waits for all lanes; the last to come calls `all_here`, which sees what each has left in `in`.
template <class F> unsigned meet(const char* op, F all_here) {
    Warp& w = my_warp();
    unsigned side = threads[current].turn++ & 1;
    if (!w.arrived) w.op = op;
    else if (strcmp(w.op, op)) fault("lanes of one warp are at different instructions: %s and %s", w.op, op);
    u32 generation = w.generation;
    if (++w.arrived == WARP) {
        all_here(w, side);
        w.arrived = 0, w.generation++;
    } else {
        block_on(&w.generation, generation, op);
    }
    return side;
}

unsigned next_side() { return threads[current].turn & 1; }

void full(u32 mask) {
    if (mask != ~0u) fault("only full warp masks are simulated, this one is %08x", mask);
}

// --- checks of accesses ---

bool same_warp(u16 other) { return other != MANY && ((other & ~LANES) - 1u) / WARP == current / WARP; }

bool ordered(u16 other, u16 warp_epoch) {
    return other == current + 1 || (same_warp(other) && warp_epoch < (u16)threads[current].warp_epoch);
}

[[noreturn]] void race(const char* verb, const char* where, uint64_t offset, u16 other, const char* did) {
    char who[40] = "other threads have";
    if (other != MANY) snprintf(who, sizeof who, "thread %u has", (other & ~LANES) - 1u);
    fault("%s of %s+%llu, which %s %s, with no barrier in between", verb, where, (unsigned long long)offset, who, did);
}

void note_read(Cell& c) {
    u16 mine = (u16)(current + 1), warp_epoch = (u16)threads[current].warp_epoch;
    bool again = c.reader && c.read_epoch == epoch && !ordered(c.reader, c.read_warp_epoch);
    if (!again) c.reader = mine;
    else if (same_warp(c.reader)) c.reader = mine | LANES;
    else c.reader = MANY;
    c.read_epoch = epoch, c.read_warp_epoch = warp_epoch;
}

void check_cell(Cell& c, const char* where, uint64_t offset, bool write) {
    const char* verb = write ? "write" : "read";
    if (c.pending) fault("%s of %s+%llu, to which an asynchronous copy of thread %u is under way", verb, where,
                         (unsigned long long)offset, c.pending - 1u);
    if (c.writer && c.write_epoch == epoch && !ordered(c.writer, c.write_warp_epoch))
        race(verb, where, offset, c.writer, "written");
    if (!write) return note_read(c);
    if (c.reader && c.read_epoch == epoch && !ordered(c.reader, c.read_warp_epoch))
        race(verb, where, offset, c.reader, "read");
    c.writer = (u16)(current + 1), c.write_epoch = epoch, c.write_warp_epoch = (u16)threads[current].warp_epoch;
}

void check_shared(unsigned offset, unsigned bytes, bool write) {
    if (offset + bytes > shared_bytes)
        fault("%s of shared +%u beyond the %u bytes of the launch", write ? "write" : "read", offset, shared_bytes);
    for (unsigned i = offset / 2; i <= (offset + bytes - 1) / 2; i++) check_cell(cells[i], "shared ", 2 * i, write);
}

// In a buffer that the kernel writes, no block may touch what another has written, nor write what
// another has read: they run in any order. `block` is, per 2 bytes, the one that wrote, or the
// one that read (marked READ), or READ_BY_MANY.
const u32 READ = 1u << 31, READ_BY_MANY = ~0u;

void check_blocks(Buffer& b, uintptr_t at, unsigned bytes, bool write) {
    u32 mine = block_number + 1;
    for (uint64_t i = (at - b.begin) / 2; i <= (at - b.begin + bytes - 1) / 2; i++) {
        u32& o = b.owned[i].block;
        bool read_only = o & READ;
        if (o && (o & ~READ) != mine && (write || !read_only))
            fault("%s of %s+%llu, which another block of this launch has %s", write ? "write" : "read", b.name,
                  (unsigned long long)(at - b.begin), read_only ? "read" : "written");
        if (write) o = mine;
        else if (!o) o = mine | READ;
        else if (read_only && o != (mine | READ)) o = READ_BY_MANY;
        // 1-byte neighbours share 2 bytes, and may belong to two threads.
        if (bytes >= 2) check_cell(b.owned[i].cell, b.name, at - b.begin, write);
    }
}

const Buffer* nearest(uintptr_t at) {
    const Buffer* best = nullptr;
    for (const Buffer& b : buffers)
        if (!best || (b.begin <= at && (best->begin > at || b.begin > best->begin))) best = &b;
    return best;
}

void check_global(uintptr_t at, unsigned bytes, bool write) {
    bool known = false;
    for (Buffer& b : buffers) {
        if (at < b.begin || at + bytes > b.begin + b.bytes) continue;
        known = true;
        if (write && !b.writable) continue;
        if (b.owned) check_blocks(b, at, bytes, write);
        return;
    }
    const char* verb = write ? "write" : "read";
    if (known) fault("write of %s, which the kernel takes as const", nearest(at)->name);
    const Buffer* b = nearest(at);
    if (!b) fault("%s of memory that is not an argument", verb);
    fault("%s of %u bytes out of bounds at %s%+lld, which has %llu bytes", verb, bytes, b->name,
          (long long)(at - b->begin), (unsigned long long)b->bytes);
}

extern "C" __attribute__((visibility("hidden"))) char __ehdr_start, _end;

void access(const void* p, unsigned bytes, bool write) {
    uintptr_t at = (uintptr_t)p;
    if (at - (uintptr_t)threads[current].stack < STACK) return;
    if (bytes <= 16 && (bytes & (bytes - 1)) == 0 && at % bytes)
        fault("%s of %u bytes at an address that is no multiple of %u", write ? "write" : "read", bytes, bytes);
    uintptr_t offset = at - (uintptr_t)shared;
    if (offset < sizeof shared) return check_shared((unsigned)offset, bytes, write);
    bool constants = at >= (uintptr_t)&__ehdr_start && at < (uintptr_t)&_end;
    if (constants && !write) return;
    check_global(at, bytes, write);
}

unsigned char* shared_pointer(void* p, const char* what) {
    if ((uintptr_t)p - (uintptr_t)shared >= sizeof shared) fault("%s outside shared memory", what);
    return (unsigned char*)p;
}

void land(const Copy& c) {
    if (c.ok) memcpy(c.to, c.from, 16);
    else memset(c.to, 0, 16);
    unsigned first = (unsigned)(c.to - shared) / 2;
    for (unsigned i = first; i < first + 8; i++) {
        cells[i].pending = 0;
        check_cell(cells[i], "shared ", 2 * i, true);  // lands now; others need a barrier from here on
    }
}

// --- running ---

void enter() {
    body(arguments);
    threads[current].done = true;
    alive--;
    // Threads that have ended are not waited for at a barrier.
    if (alive && block_arrived == alive) block_arrived = 0, block_barrier++, epoch++;
    switch_to(&threads[current].sp, scheduler);
    abort();
}

bool ready(const Thread& t) { return !t.done && !(t.waits_on && *t.waits_on == t.waits_value); }

void report_deadlock() {
    const Thread* first = nullptr;
    for (Thread& t : threads)
        if (!t.done && !first) first = &t;
    unsigned ended = count - alive, at_barrier = block_arrived;
    snprintf(error_text, error_size,
             "block (%u, %u, %u): no thread can go on: %u of %u at __syncthreads, %u have ended, thread %u waits in %s",
             here.x, here.y, here.z, at_barrier, count, ended, (unsigned)(first - &threads[0]), first->at);
    failed = true;
}

void start_block() {
    memset(shared, 0xff, shared_bytes);  // NaN in every floating type
    cells.assign(shared_bytes / 2 + 1, Cell());
    for (Warp& w : warps) w.generation = w.arrived = 0;
    block_arrived = 0, alive = count, epoch++;
    for (Thread& t : threads) {
        t.done = false, t.waits_on = nullptr, t.turn = t.warp_epoch = 0;
        t.groups.assign(1, CopyGroup());
        t.sp = new_fiber(t.stack, STACK, enter);
    }
}

unsigned next_random(unsigned& seed) { return (seed = seed * 1664525u + 1013904223u) >> 8; }

void run_block(std::vector<unsigned>& order, unsigned& seed) {
    start_block();
    while (alive && !failed) {
        if (seed)
            for (unsigned i = count - 1; i > 0; i--) std::swap(order[i], order[next_random(seed) % (i + 1)]);
        bool any = false;
        for (unsigned w = 0; w < count && !failed; w += WARP)
            for (bool again = true; again && !failed;) {
                again = false;
                for (unsigned i = w; i < w + WARP && !failed; i++) {
                    current = order[i];
                    if (!ready(threads[current])) continue;
                    threads[current].waits_on = nullptr;
                    switch_to(&scheduler, threads[current].sp);
                    any = again = true;
                }
            }
        if (!any && !failed) report_deadlock();
    }
}

}  // namespace

dim3 thread_index() {
    unsigned x = current % block.x, rest = current / block.x;
    return {x, rest % block.y, rest / block.y};
}
dim3 block_index() { return here; }
dim3 block_dim() { return block; }
dim3 grid_dim() { return grid; }
unsigned char* shared_memory() { return shared; }

void barrier() {
    if (++block_arrived == alive) {
        block_arrived = 0, block_barrier++, epoch++;
    } else {
        block_on(&block_barrier, block_barrier, "__syncthreads");
    }
}

void warp_barrier(u32 mask) {
    full(mask);
    meet("__syncwarp", [](Warp&, unsigned) {});
    threads[current].warp_epoch++;
}

uint64_t shuffle_xor(u32 mask, uint64_t value, int lanes) {
    full(mask);
    my_warp().in[next_side()][lane()][0] = value;
    unsigned side = meet("__shfl_xor_sync", [](Warp&, unsigned) {});
    return my_warp().in[side][(lane() ^ lanes) % WARP][0];
}

U4 ldmatrix(const void* p, bool trans) {
    access(p, 16, false);
    shared_pointer((void*)p, "ldmatrix of an address");
    my_warp().row[next_side()][lane()] = p;
    unsigned side = meet(trans ? "ldmatrix.trans" : "ldmatrix", [](Warp&, unsigned) {});
    U4 r;
    const void** rows = my_warp().row[side];
    unsigned l = lane();
    for (unsigned m = 0; m < 4; m++) {
        if (!trans) {
            memcpy(&r.x[m], (const u16*)rows[m * 8 + l / 4] + (l % 4) * 2, 4);
        } else {
            u16 low = ((const u16*)rows[m * 8 + (l % 4) * 2])[l / 4];
            u16 high = ((const u16*)rows[m * 8 + (l % 4) * 2 + 1])[l / 4];
            r.x[m] = low | (u32)high << 16;
        }
    }
    return r;
}

// Fragments of mma.m16n8k16 as in the PTX ISA. Sums are fp32, in the order of k.
static void multiply(Warp& w, unsigned side, bool brain) {
    static float a[16][16], b[16][8];
    auto half = [&](uint64_t pair, int i) {
        u16 bits = (u16)(pair >> (16 * i));
        return brain ? from_brain(bits) : halves[bits];
    };
    for (unsigned l = 0; l < WARP; l++) {
        unsigned group = l / 4, k = (l % 4) * 2;
        const uint64_t* in = w.in[side][l];
        for (int i = 0; i < 2; i++) {
            a[group][k + i] = half(in[0], i), a[group + 8][k + i] = half(in[0] >> 32, i);
            a[group][k + 8 + i] = half(in[1], i), a[group + 8][k + 8 + i] = half(in[1] >> 32, i);
            b[k + i][group] = half(in[2], i), b[k + 8 + i][group] = half(in[2] >> 32, i);
        }
    }
    float sums[16][8];
    for (int i = 0; i < 16; i++) {
        for (int j = 0; j < 8; j++) sums[i][j] = 0;
        for (int k = 0; k < 16; k++)
            for (int j = 0; j < 8; j++) sums[i][j] += a[i][k] * b[k][j];
    }
    for (unsigned l = 0; l < WARP; l++) {
        unsigned group = l / 4, j = (l % 4) * 2;
        float mine[4] = {sums[group][j], sums[group][j + 1], sums[group + 8][j], sums[group + 8][j + 1]};
        memcpy(w.out[side][l], mine, sizeof mine);
    }
}

F4 mma(F4 c, U4 a, u32 b0, u32 b1, bool brain) {
    uint64_t* in = my_warp().in[next_side()][lane()];
    memcpy(in, &a, 16);
    in[2] = b0 | (uint64_t)b1 << 32;
    unsigned side = meet(brain ? "mma.bf16" : "mma.f16", [brain](Warp& w, unsigned s) { multiply(w, s, brain); });
    F4 product;
    memcpy(&product, my_warp().out[side][lane()], 16);
    for (int i = 0; i < 4; i++) c.x[i] += product.x[i];
    return c;
}

// The bytes are not there before the thread waits for the group, and until then nobody may touch
// the place they go to.
void copy_async(void* to, const void* from, bool ok) {
    unsigned char* target = shared_pointer(to, "asynchronous copy to an address");
    access(target, 16, true);
    if (ok) access(from, 16, false);
    for (unsigned i = 0; i < 8; i++) cells[(target - shared) / 2 + i].pending = (u16)(current + 1);
    threads[current].groups.back().copies.push_back({target, (const unsigned char*)from, ok});
}

void copy_commit() { threads[current].groups.push_back(CopyGroup()); }

void copy_wait(int left) {
    std::vector<CopyGroup>& groups = threads[current].groups;  // the last is still open
    while ((int)groups.size() - 1 > left) {
        for (const Copy& c : groups.front().copies) land(c);
        groups.erase(groups.begin());
    }
}

void check(const void* p, unsigned bytes, bool write) { access(p, bytes, write); }

float from_half(u16 bits) { return halves[bits]; }

u16 to_brain(float x) {
    u32 bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
    return (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Round to nearest, ties to even: a number below 2^-14 by adding what shifts its last bit into
// place, others by adding to the bits.
u16 to_half(float x) {
    u32 bits;
    memcpy(&bits, &x, 4);
    u32 sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return 0x7fff;
    if (magnitude >= 0x477ff000) return (u16)(sign | 0x7c00);
    if (magnitude < 0x38800000) {
        float f;
        memcpy(&f, &magnitude, 4);
        f += 0.5f;
        memcpy(&magnitude, &f, 4);
        return (u16)(sign | (magnitude - 0x3f000000));
    }
    return (u16)(sign | ((magnitude + 0xfff + (magnitude >> 13 & 1)) >> 13) - (112 << 10));
}

static float half_value(u16 bits) {
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    float f = exponent == 31 ? (fraction ? NAN : INFINITY)
            : exponent ? ldexpf(1024 + fraction, exponent - 25) : ldexpf(fraction, -24);
    return bits & 0x8000 ? -f : f;
}

struct Tables {
    Tables() { for (unsigned i = 0; i < 1 << 16; i++) halves[i] = half_value((u16)i); }
} tables;

}  // namespace cudasim

struct LaunchBuffer { uint64_t address, bytes; int writable; const char* name; };

// Runs a kernel. `values` point at its arguments, of `sizes` bytes. 0, or 1 with the error's text.
extern "C" __attribute__((visibility("default"))) int cudasim_launch(void (*kernel)(void**), const unsigned* grid_dim, const unsigned* block_dim,
                              unsigned shared_bytes, unsigned seed, int n_values, void** values, const int* sizes,
                              int n_buffers, const LaunchBuffer* given, char* error, int error_bytes) {
    using namespace cudasim;
    static unsigned char storage[64 * 64] __attribute__((aligned(64)));
    grid = {grid_dim[0], grid_dim[1], grid_dim[2]}, block = {block_dim[0], block_dim[1], block_dim[2]};
    count = block.x * block.y * block.z;
    error_text = error, error_size = error_bytes, failed = false, body = kernel;
    cudasim::shared_bytes = shared_bytes;
    for (int i = 0; i < n_values; i++)
        memcpy(arguments[i] = storage + 64 * i, values[i], sizes[i]);
    buffers.clear(), owned.clear();
    owned.reserve(n_buffers);
    for (int i = 0; i < n_buffers; i++) {
        const LaunchBuffer& g = given[i];
        owned.emplace_back(g.writable ? g.bytes / 2 + 2 : 0);
        buffers.push_back({(uintptr_t)g.address, g.bytes, g.writable, g.name, g.writable ? owned[i].data() : nullptr});
    }
    while (threads.size() < count) {
        threads.emplace_back();
        threads.back().stack = (unsigned char*)aligned_alloc(64, STACK);
    }
    while (threads.size() > count) {
        free(threads.back().stack);
        threads.pop_back();
    }
    warps.resize(count / WARP);
    std::vector<unsigned> order(count);
    for (unsigned i = 0; i < count; i++) order[i] = i;
    block_number = 0;
    for (unsigned z = 0; z < grid.z && !failed; z++)
        for (unsigned y = 0; y < grid.y && !failed; y++)
            for (unsigned x = 0; x < grid.x && !failed; x++, block_number++) {
                here = {x, y, z};
                run_block(order, seed);
            }
    return failed;
}

#define CHECKED(n) \
    extern "C" void __tsan_read##n(void* p) { cudasim::access(p, n, false); } \
    extern "C" void __tsan_write##n(void* p) { cudasim::access(p, n, true); } \
    extern "C" void __tsan_unaligned_read##n(void* p) { cudasim::access(p, n, false); } \
    extern "C" void __tsan_unaligned_write##n(void* p) { cudasim::access(p, n, true); }
CHECKED(1)
CHECKED(2)
CHECKED(4)
CHECKED(8)
CHECKED(16)
extern "C" void __tsan_read_range(void* p, unsigned long n) { cudasim::access(p, (unsigned)n, false); }
extern "C" void __tsan_write_range(void* p, unsigned long n) { cudasim::access(p, (unsigned)n, true); }
extern "C" void __tsan_init() {}
