//! Where this program begins: before the C library does.
//!
//! What that sets up for every program costs more than all that a task's process does itself: it asks the processor for its features by a dozen
//! CPUID instructions, each of which a virtual machine has to be asked for. So a task's process is served without, and ends; what it is not served
//! with here, the C library begins with as ever.
//!
//! Until then there is no memory of the C library's, which [`memory`] has instead, with the functions that compilers call; and
//! system calls through the C library find a place for the numbers of their errors.

use std::arch::{asm, global_asm};
use std::ffi::OsString;
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStringExt;

use hayloft_farm::execution;
use hayloft_farm::small::Environment;

use crate::{as_a_task, memory};

// The stack is as the kernel has made it; `_start` is the C library's and finds it so as well.
global_asm!(
    ".globl hayloft_task_begins",
    ".type hayloft_task_begins, @function",
    "hayloft_task_begins:",
    "xor ebp, ebp",
    "mov rbx, rsp",
    "mov rdi, rsp",
    "and rsp, -16",
    "call {begin}",
    "mov rsp, rbx",
    "xor edx, edx",
    "jmp _start",
    begin = sym begin,
);

/// Thread-local storage until the C library has its own: variables are below the pointer, what describes the thread is behind it, and zero
/// means nothing.
const LOCAL_WORDS: usize = 1024;
/// Of these below the pointer.
const LOCAL_BELOW: usize = 512;
static mut LOCAL: MaybeUninit<[usize; LOCAL_WORDS]> = MaybeUninit::zeroed();

const ARCH_SET_FS: usize = 0x1002;

/// Does not return when this process was served.
unsafe extern "C" fn begin(stack: *const usize) {
    // SAFETY: the kernel has put there how many arguments there are, these, a null pointer, the variables, and a null pointer; all of them are
    // strings that end in a zero. Nothing else runs yet.
    unsafe {
        let count = *stack;
        let first = stack.add(1).cast::<*const u8>();
        if count < 2 || is_others(string(*first.add(1))) {
            return;
        }
        let local = (&raw mut LOCAL).cast::<usize>().add(LOCAL_BELOW);
        // A program finds its pointer to it there.
        *local = local as usize;
        let result: usize;
        asm!(
            "syscall",
            inlateout("rax") libc::SYS_arch_prctl as usize => result,
            in("rdi") ARCH_SET_FS, in("rsi") local,
            lateout("rcx") _, lateout("r11") _,
            options(nostack),
        );
        if result != 0 {
            return;
        }
        memory::begins();
        let arguments: Vec<OsString> =
            (1..count).map(|at| OsString::from_vec(string(*first.add(at)).to_vec())).collect();
        let mut variables = Vec::with_capacity(64);
        let mut at = first.add(count + 1);
        while !(*at).is_null() {
            let variable = string(*at);
            // As the standard library has it.
            if variable.iter().skip(1).any(|byte| *byte == b'=') {
                variables.push(variable.to_vec());
            }
            at = at.add(1);
        }
        if let Some(ending) = as_a_task(&arguments, Environment(variables)) {
            hayloft_process::exit_now(ending.leave().into());
        }
        drop(arguments);
        memory::ends();
    }
}

/// Whether it is done by the C library, whatever the rest of the arguments.
fn is_others(argument: &[u8]) -> bool {
    argument == b"--version" || argument == execution::SPAWNER_ARGUMENT.as_bytes()
}

/// # Safety
/// It ends in a zero, and lives as long as this process.
unsafe fn string(text: *const u8) -> &'static [u8] {
    // SAFETY: by the caller.
    unsafe {
        let mut length = 0;
        // Compilers see strlen(3) in such a loop, unless each byte is to be read.
        while text.add(length).read_volatile() != 0 {
            length += 1;
        }
        std::slice::from_raw_parts(text, length)
    }
}
