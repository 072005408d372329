// What the C++ runtime needs of a system that has no exceptions: an error stops the module, which the page reports.

#include <cstddef>

extern "C" {
void* __cxa_allocate_exception(size_t) { __builtin_trap(); }
[[noreturn]] void __cxa_throw(void*, void*, void (*)(void*)) { __builtin_trap(); }
}
