//! The filter of system calls: what a build never needs and what would reach beyond its root is refused.
//!
//! It is a list of what is refused, so that a new system call of a new libc works. A foreign architecture is
//! filtered by its own list, not killed: builds run 32-bit programs (which is why this is not made
//! by the `seccompiler` crate: its filters kill them). Calls that the filter always lets pass cost nothing since
//! Linux 5.11, which keeps a bitmap of them.
//!
//! Such a list has to be looked at with each new kernel: docs/security.md says which calls were, and why each is on it or not.

use libc::sock_filter;

use crate::spec::Network;

const AUDIT_ARCH_X86_64: u32 = 0xc000_003e;
const AUDIT_ARCH_I386: u32 = 0x4000_0003;
const AUDIT_ARCH_AARCH64: u32 = 0xc000_00b7;
/// x86-64 calls from here on are those of the x32 ABI.
const X32_BIT: u32 = 0x4000_0000;

const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
const JUMP: u16 = (libc::BPF_JMP | libc::BPF_JA) as u16;
const JUMP_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
const JUMP_GREATER_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K) as u16;
const JUMP_ANY_BIT: u16 = (libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K) as u16;
const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;

/// Offsets in `struct seccomp_data`.
const NUMBER_AT: u32 = 0;
const ARCH_AT: u32 = 4;
const FIRST_ARGUMENT_AT: u32 = 16;
/// The upper half of it, on the little-endian processors that there are sections for.
const FIRST_ARGUMENT_HIGH_AT: u32 = 20;

/// Calls that the `libc` crate has no names for; they have these numbers on all architectures.
const OPEN_TREE_ATTR: libc::c_long = 467;
const LISTNS: libc::c_long = 470;

/// New namespaces, in the flags of clone(2).
const NEW_NAMESPACES: u32 = (libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET) as u32
    | 0x80; // CLONE_NEWTIME

/// What unshare(2) may be asked for. Whatever else there is makes a namespace, and kernels get new ones (an empty mount
/// namespace is a bit of its own in Linux 7.1).
const UNSHARED: u32 = (libc::CLONE_FS
    | libc::CLONE_FILES
    | libc::CLONE_SYSVSEM
    | libc::CLONE_THREAD
    | libc::CLONE_SIGHAND
    | libc::CLONE_VM) as u32;

/// The calls of one architecture.
struct Calls {
    arch: u32,
    /// Refused with EPERM.
    refused: &'static [libc::c_long],
    /// As if the kernel did not have them (ENOSYS): libraries then do without. clone3 has its flags in memory,
    /// where a filter cannot see them; io_uring does in the kernel what a filter would have seen as calls; listns
    /// lists namespaces, of which a root has none to enter.
    absent: &'static [libc::c_long],
    /// clone(2): refused with EPERM when the first argument has a bit of [`NEW_NAMESPACES`].
    clone: libc::c_long,
    /// unshare(2): refused with EPERM when the first argument has a bit that is not of [`UNSHARED`].
    unshare: libc::c_long,
    /// socket(2) and socketpair(2): as if the kernel did not have the [`FAMILIES`].
    sockets: &'static [libc::c_long],
    /// socketcall(2), which has the family in memory, where a filter cannot see it: without a network it makes no sockets.
    socketcall: Option<libc::c_long>,
}

/// Kinds of sockets that no network namespace bounds: to the host of a virtual machine, and to the kernel's ciphers.
const FAMILIES: [i32; 2] = [libc::AF_VSOCK, libc::AF_ALG];
/// What makes a socket, as the first argument of socketcall(2).
const SOCKETCALL_SOCKET: u32 = 1;

const NATIVE: Calls = Calls {
    arch: if cfg!(target_arch = "aarch64") { AUDIT_ARCH_AARCH64 } else { AUDIT_ARCH_X86_64 },
    refused: &[
        libc::SYS_mount,
        libc::SYS_umount2,
        libc::SYS_pivot_root,
        libc::SYS_move_mount,
        libc::SYS_open_tree,
        OPEN_TREE_ATTR,
        libc::SYS_fsopen,
        libc::SYS_fsconfig,
        libc::SYS_fsmount,
        libc::SYS_fspick,
        libc::SYS_mount_setattr,
        libc::SYS_setns,
        libc::SYS_open_by_handle_at,
        libc::SYS_bpf,
        libc::SYS_perf_event_open,
        libc::SYS_userfaultfd,
        libc::SYS_add_key,
        libc::SYS_request_key,
        libc::SYS_keyctl,
        libc::SYS_init_module,
        libc::SYS_finit_module,
        libc::SYS_delete_module,
        libc::SYS_kexec_load,
        libc::SYS_kexec_file_load,
        libc::SYS_reboot,
        libc::SYS_swapon,
        libc::SYS_swapoff,
        libc::SYS_acct,
        libc::SYS_quotactl,
        libc::SYS_quotactl_fd,
        libc::SYS_syslog,
        libc::SYS_vhangup,
        libc::SYS_settimeofday,
        libc::SYS_clock_settime,
        libc::SYS_clock_adjtime,
        #[cfg(target_arch = "x86_64")]
        libc::SYS_iopl,
        #[cfg(target_arch = "x86_64")]
        libc::SYS_ioperm,
    ],
    absent: &[
        libc::SYS_clone3,
        libc::SYS_io_uring_setup,
        libc::SYS_io_uring_enter,
        libc::SYS_io_uring_register,
        LISTNS,
    ],
    clone: libc::SYS_clone,
    unshare: libc::SYS_unshare,
    sockets: &[libc::SYS_socket, libc::SYS_socketpair],
    socketcall: None,
};

/// 32-bit programs on x86-64; the numbers are those of `asm/unistd_32.h`.
#[cfg(target_arch = "x86_64")]
const I386: Calls = Calls {
    arch: AUDIT_ARCH_I386,
    refused: &[
        21, 22, 25, 51, 52, 79, 87, 88, 101, 103, 110, 111, 115, 128, 129, 131, 217, 264, 283, 286, 287, 288,
        336, 342, 343, 346, 350, 357, 374, 404, 405, 428, 429, 430, 431, 432, 433, 442, 443, 467,
    ],
    absent: &[435, 425, 426, 427, 470],
    clone: 120,
    unshare: 310,
    sockets: &[359, 360],
    socketcall: Some(102),
};

fn step(code: u16, jt: u8, jf: u8, k: u32) -> sock_filter {
    sock_filter { code, jt, jf, k }
}

fn errno(number: i32) -> sock_filter {
    step(RETURN, 0, 0, libc::SECCOMP_RET_ERRNO | number as u32)
}

impl Calls {
    /// What follows when the architecture is this one; always returns.
    fn section(&self, network: Network) -> Vec<sock_filter> {
        let mut out = vec![step(LOAD, 0, 0, NUMBER_AT)];
        if self.arch == AUDIT_ARCH_X86_64 {
            out.extend([step(JUMP_GREATER_EQUAL, 0, 1, X32_BIT), errno(libc::ENOSYS)]);
        }
        for (calls, error) in [(self.refused, libc::EPERM), (self.absent, libc::ENOSYS)] {
            for call in calls {
                out.extend([step(JUMP_EQUAL, 0, 1, *call as u32), errno(error)]);
            }
        }
        for call in self.sockets {
            out.extend([
                step(JUMP_EQUAL, 0, 5, *call as u32),
                step(LOAD, 0, 0, FIRST_ARGUMENT_AT),
                step(JUMP_EQUAL, 1, 0, FAMILIES[0] as u32),
                step(JUMP_EQUAL, 0, 1, FAMILIES[1] as u32),
                errno(libc::EAFNOSUPPORT),
                step(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW),
            ]);
        }
        if let Some(call) = self.socketcall.filter(|_| network == Network::None) {
            out.extend([
                step(JUMP_EQUAL, 0, 4, call as u32),
                step(LOAD, 0, 0, FIRST_ARGUMENT_AT),
                step(JUMP_EQUAL, 0, 1, SOCKETCALL_SOCKET),
                errno(libc::EAFNOSUPPORT),
                step(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW),
            ]);
        }
        out.extend([
            step(JUMP_EQUAL, 0, 4, self.clone as u32),
            step(LOAD, 0, 0, FIRST_ARGUMENT_AT),
            step(JUMP_ANY_BIT, 0, 1, NEW_NAMESPACES),
            errno(libc::EPERM),
            step(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW),
        ]);
        out.extend([
            step(JUMP_EQUAL, 0, 6, self.unshare as u32),
            step(LOAD, 0, 0, FIRST_ARGUMENT_AT),
            step(JUMP_ANY_BIT, 2, 0, !UNSHARED),
            step(LOAD, 0, 0, FIRST_ARGUMENT_HIGH_AT),
            step(JUMP_EQUAL, 1, 0, 0),
            errno(libc::EPERM),
            step(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW),
        ]);
        out.push(step(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW));
        out
    }
}

/// The filter of this machine's architecture.
pub(crate) fn filter(network: Network) -> Vec<sock_filter> {
    #[cfg(target_arch = "x86_64")]
    let all = [NATIVE, I386];
    #[cfg(not(target_arch = "x86_64"))]
    let all = [NATIVE];
    let mut out = vec![step(LOAD, 0, 0, ARCH_AT)];
    for calls in all {
        let section = calls.section(network);
        // Sections are longer than the eight bits of a conditional jump reach.
        out.extend([step(JUMP_EQUAL, 1, 0, calls.arch), step(JUMP, 0, 0, section.len() as u32)]);
        out.extend(section);
    }
    out.push(errno(libc::ENOSYS));
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the filter says to a call: an interpreter of the few instructions it is made of.
    fn verdict(arch: u32, number: u32, argument: u32) -> u32 {
        verdict_with(Network::None, arch, number, argument.into())
    }

    fn verdict_with(network: Network, arch: u32, number: u32, argument: u64) -> u32 {
        let program = filter(network);
        let (mut at, mut loaded) = (0, 0);
        loop {
            let step = program[at];
            at += 1;
            let test = match step.code {
                LOAD => {
                    loaded = match step.k {
                        NUMBER_AT => number,
                        ARCH_AT => arch,
                        FIRST_ARGUMENT_AT => argument as u32,
                        FIRST_ARGUMENT_HIGH_AT => (argument >> 32) as u32,
                        other => panic!("no load from {other}"),
                    };
                    continue;
                }
                JUMP => {
                    at += step.k as usize;
                    continue;
                }
                RETURN => return step.k,
                JUMP_EQUAL => loaded == step.k,
                JUMP_GREATER_EQUAL => loaded >= step.k,
                JUMP_ANY_BIT => loaded & step.k != 0,
                other => panic!("no instruction {other}"),
            };
            at += usize::from(if test { step.jt } else { step.jf });
        }
    }

    const ALLOW: u32 = libc::SECCOMP_RET_ALLOW;
    const EPERM: u32 = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
    const ENOSYS: u32 = libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32;

    #[test]
    fn what_builds_need_passes() {
        for call in
            [libc::SYS_openat, libc::SYS_execve, libc::SYS_ptrace, libc::SYS_chroot, libc::SYS_personality]
        {
            assert_eq!(verdict(NATIVE.arch, call as u32, 0), ALLOW, "{call}");
        }
        assert_eq!(verdict(NATIVE.arch, 10_000, 0), ALLOW, "a call of the future");
    }

    #[test]
    fn what_reaches_beyond_the_root_is_refused() {
        for call in NATIVE.refused {
            assert_eq!(verdict(NATIVE.arch, *call as u32, 0), EPERM, "{call}");
        }
        for call in NATIVE.absent {
            assert_eq!(verdict(NATIVE.arch, *call as u32, 0), ENOSYS, "{call}");
        }
        assert_eq!(verdict(0x1234, 1, 0), ENOSYS, "an unknown architecture");
    }

    #[test]
    fn processes_are_made_but_no_namespaces() {
        let (clone, unshare) = (NATIVE.clone as u32, NATIVE.unshare as u32);
        let threads = libc::CLONE_VM | libc::CLONE_THREAD | libc::CLONE_PARENT_SETTID | libc::CLONE_SETTLS;
        for flags in [libc::SIGCHLD, libc::CLONE_FS, threads] {
            assert_eq!(verdict(NATIVE.arch, clone, flags as u32), ALLOW, "{flags:x}");
        }
        for flags in [0, libc::CLONE_FS, libc::CLONE_FILES | libc::CLONE_SYSVSEM] {
            assert_eq!(verdict(NATIVE.arch, unshare, flags as u32), ALLOW, "{flags:x}");
        }
        for flag in [libc::CLONE_NEWUSER, libc::CLONE_NEWNS, libc::CLONE_NEWPID, 0x80] {
            assert_eq!(verdict(NATIVE.arch, clone, (flag | libc::SIGCHLD) as u32), EPERM, "{flag:x}");
            assert_eq!(verdict(NATIVE.arch, unshare, (flag | libc::CLONE_FS) as u32), EPERM, "{flag:x}");
        }
        // An empty mount namespace, and bits that no kernel knows yet.
        for flag in [0x0010_0000_u64, 1 << 37, 1 << 63] {
            assert_eq!(verdict_with(Network::None, NATIVE.arch, unshare, flag), EPERM, "{flag:x}");
        }
    }

    #[test]
    fn calls_of_new_kernels_are_judged_by_what_they_do() {
        #[cfg(target_arch = "x86_64")]
        let arches = [NATIVE.arch, AUDIT_ARCH_I386];
        #[cfg(not(target_arch = "x86_64"))]
        let arches = [NATIVE.arch];
        for arch in arches {
            assert_eq!(verdict(arch, OPEN_TREE_ATTR as u32, 0), EPERM);
            assert_eq!(verdict(arch, LISTNS as u32, 0), ENOSYS);
            // From cachestat to removexattrat, file_getattr, file_setattr, rseq_slice_yield.
            for call in (451..=466).chain([468, 469, 471]) {
                assert_eq!(verdict(arch, call, 0), ALLOW, "{call}");
            }
        }
        // The kernel's own trampolines make these; refused, a program that somebody traces would die.
        #[cfg(target_arch = "x86_64")]
        for call in [335, 336] {
            assert_eq!(verdict(AUDIT_ARCH_X86_64, call, 0), ALLOW, "{call}");
        }
    }

    #[test]
    fn sockets_stay_in_the_network_namespace() {
        const UNKNOWN: u32 = libc::SECCOMP_RET_ERRNO | libc::EAFNOSUPPORT as u32;
        let calls = NATIVE.sockets.iter().map(|call| (NATIVE.arch, *call as u32));
        #[cfg(target_arch = "x86_64")]
        let calls = calls.chain([(AUDIT_ARCH_I386, 359), (AUDIT_ARCH_I386, 360)]);
        for (arch, call) in calls {
            for network in [Network::None, Network::Host] {
                let family = |family: i32| verdict_with(network, arch, call, family as u64);
                assert_eq!((family(libc::AF_VSOCK), family(libc::AF_ALG)), (UNKNOWN, UNKNOWN), "{call}");
                for usual in [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK, libc::AF_KEY] {
                    assert_eq!(family(usual), ALLOW, "{call} {usual}");
                }
            }
        }
        #[cfg(target_arch = "x86_64")]
        {
            let socketcall = |network, what| verdict_with(network, AUDIT_ARCH_I386, 102, what);
            assert_eq!((socketcall(Network::None, 1), socketcall(Network::Host, 1)), (UNKNOWN, ALLOW));
            assert_eq!(socketcall(Network::None, 8), ALLOW, "socketpair");
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn other_abis_of_the_same_processor_have_no_back_door() {
        assert_eq!(verdict(AUDIT_ARCH_X86_64, X32_BIT | libc::SYS_mount as u32, 0), ENOSYS);
        // umount, stime and the two with 64-bit times are more; kexec_file_load is missing.
        assert_eq!(I386.refused.len(), NATIVE.refused.len() + 3);
        assert_eq!(verdict(AUDIT_ARCH_I386, 21, 0), EPERM, "mount");
        assert_eq!(verdict(AUDIT_ARCH_I386, 5, 0), ALLOW, "open");
        assert_eq!(verdict(AUDIT_ARCH_I386, 120, libc::CLONE_NEWUSER as u32), EPERM, "clone");
        assert_eq!(verdict(AUDIT_ARCH_I386, 310, 0), ALLOW, "unshare of nothing");
    }
}
