// A thread's part of the work, and its memory while a kernel runs.
#pragma once

#include <immintrin.h>
#include <omp.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

struct Range {
    int64_t begin, end;
};

// The calling thread's share of `count` things, by OpenMP's numbering.
static inline Range share_of(int64_t count) {
    const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
    return {count * thread / threads, count * (thread + 1) / threads};
}

static inline int64_t divide_up(int64_t count, int64_t size) { return (count + size - 1) / size; }

// Prefetches `count` elements to the L2 cache.
template <typename T>
static inline void prefetch(const T* from, int64_t count) {
    for (const char *p = (const char*)from, *end = (const char*)(from + count); p < end; p += 64) _mm_prefetch(p, _MM_HINT_T1);
}

// A thread's memory during a kernel, reused by the next one. It uses huge pages, because with small ones an operand that fits in
// the L2 cache still evicts itself. If it is too small, other memory is allocated, and the next kernel gets more.
class Arena {
   public:
    void* take(int64_t bytes) {
        if (live_++ == 0) {
            if (wanted_ > size_) {
                constexpr int64_t HUGE_PAGE = 1 << 21;
                free(memory_);
                size_ = divide_up(wanted_, HUGE_PAGE) * HUGE_PAGE;
                memory_ = (char*)aligned_alloc(HUGE_PAGE, size_);
                if (!memory_) size_ = 0;
                madvise(memory_, size_, MADV_HUGEPAGE);  // no effect on size 0
            }
            wanted_ = 0;
        }
        bytes = divide_up(bytes, 64) * 64;
        wanted_ += bytes;
        return wanted_ <= size_ ? memory_ + wanted_ - bytes : ::operator new(bytes, std::align_val_t(64));
    }
    void give_back(void* p) {
        live_--;
        if (p < memory_ || p >= memory_ + size_) ::operator delete(p, std::align_val_t(64));
    }
    ~Arena() { free(memory_); }

   private:
    char* memory_ = nullptr;
    int64_t size_ = 0, wanted_ = 0, live_ = 0;
};

struct GiveBack {
    static inline thread_local Arena arena;
    void operator()(void* p) const { arena.give_back(p); }
};
template <typename T>
using Scratch = std::unique_ptr<T[], GiveBack>;

// Memory for `count` elements, aligned to a cache line, until the end of the scope, in which the allocating thread frees it.
template <typename T>
static inline Scratch<T> scratch(int64_t count) {
    return Scratch<T>((T*)GiveBack::arena.take(std::max<int64_t>(count, 1) * sizeof(T)));
}
