// The sanitizer that a program is linked with. The emulator is compiled once, without any, for all programs: what
// a program has not got is null.
#pragma once
#include <cstddef>

extern "C" {
[[gnu::weak]] void __sanitizer_set_death_callback(void (*)());
// AddressSanitizer's
[[gnu::weak]] void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom, size_t bytes);
[[gnu::weak]] void __sanitizer_finish_switch_fiber(void* fake_stack, const void** bottom, size_t* bytes);
[[gnu::weak]] void __asan_poison_memory_region(const volatile void* start, size_t bytes);
[[gnu::weak]] void __asan_unpoison_memory_region(const volatile void* start, size_t bytes);
// ThreadSanitizer's
[[gnu::weak]] void* __tsan_create_fiber(unsigned flags);
[[gnu::weak]] void __tsan_destroy_fiber(void*);
[[gnu::weak]] void* __tsan_get_current_fiber();
[[gnu::weak]] void __tsan_switch_to_fiber(void*, unsigned flags);
[[gnu::weak]] void __tsan_set_fiber_name(void*, const char*);
[[gnu::weak]] void __tsan_acquire(void*);
[[gnu::weak]] void __tsan_release(void*);
[[gnu::weak]] void AnnotateIgnoreReadsBegin(const char*, int);
[[gnu::weak]] void AnnotateIgnoreReadsEnd(const char*, int);
[[gnu::weak]] void AnnotateIgnoreWritesBegin(const char*, int);
[[gnu::weak]] void AnnotateIgnoreWritesEnd(const char*, int);
}

namespace emulator {
inline bool has_address_sanitizer() { return __asan_poison_memory_region != nullptr; }
inline bool has_thread_sanitizer() { return __tsan_create_fiber != nullptr; }
}  // namespace emulator
