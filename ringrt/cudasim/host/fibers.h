// Fibers: threads of control that hand over to one another by name, on stacks of their own.
#pragma once
#include <cstddef>

#if defined(__x86_64__)
// Saves the registers that a call must keep, and the stack pointer in *from; goes on where `to`
// was saved.
extern "C" void cudasim_switch(void** from, void* to);
asm(R"(
.text
.globl cudasim_switch
.hidden cudasim_switch
cudasim_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
)");
static inline void switch_to(void** from, void* to) { cudasim_switch(from, to); }
// A fiber that will call `entry`, which must not return.
static inline void* new_fiber(unsigned char* stack, size_t bytes, void (*entry)()) {
    void** sp = (void**)(((size_t)stack + bytes) & ~(size_t)15);
    *--sp = nullptr;
    *--sp = (void*)entry;
    for (int i = 0; i < 6; i++) *--sp = nullptr;
    return sp;
}
#elif defined(__aarch64__)
extern "C" void cudasim_switch(void** from, void* to);
asm(R"(
.text
.globl cudasim_switch
.hidden cudasim_switch
cudasim_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
)");
static inline void switch_to(void** from, void* to) { cudasim_switch(from, to); }
static inline void* new_fiber(unsigned char* stack, size_t bytes, void (*entry)()) {
    void** sp = (void**)((((size_t)stack + bytes) & ~(size_t)15) - 160);
    for (int i = 0; i < 20; i++) sp[i] = nullptr;
    sp[11] = (void*)entry;  // x30, where `ret` goes
    return sp;
}
#else
#error "the CUDA simulator has no context switch for this machine"
#endif
