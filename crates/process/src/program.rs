//! A program that a process becomes, with everything allocated beforehand: to become it makes system calls only.

use std::ffi::{CStr, CString};
use std::io;
use std::ptr::null;

use libc::c_char;

/// See the module's documentation.
#[derive(Debug)]
pub struct Program {
    /// The files that it may be, in their order.
    files: Vec<CString>,
    /// There is no path in its name.
    is_searched: bool,
    /// For a file without a first line that names its interpreter: the shell and that file, then the arguments. One for each file.
    scripts: Vec<Vec<*const c_char>>,
    args: Vec<*const c_char>,
    environment: Vec<*const c_char>,
    /// What the pointers point to.
    _strings: Vec<CString>,
}

const SHELL: &CStr = c"/bin/sh";

impl Program {
    /// A command in an environment, whose PATH says where its program is searched for, as execvp(3) does.
    ///
    /// # Errors
    /// When there is no command, or a zero byte somewhere in it.
    pub fn new(command: &[Vec<u8>], environment: &[Vec<u8>]) -> io::Result<Program> {
        let strings =
            |all: &[Vec<u8>]| all.iter().map(|one| CString::new(&**one)).collect::<Result<Vec<_>, _>>();
        let (mut args, variables) = (strings(command)?, strings(environment)?);
        let name = command.first().ok_or(io::ErrorKind::InvalidInput)?;
        let path = environment.iter().find_map(|one| one.strip_prefix(b"PATH="));
        let of_folder = |folder: &[u8]| {
            let folder = if folder.is_empty() { b"." } else { folder };
            CString::new([folder, b"/", name].concat())
        };
        let is_searched = !name.is_empty() && !name.contains(&b'/');
        let folders = path.unwrap_or(b"/usr/bin:/bin").split(|byte| *byte == b':');
        let files: Vec<CString> = match is_searched {
            true => folders.map(of_folder).collect::<Result<_, _>>()?,
            false => vec![args[0].clone()],
        };
        let pointers =
            |all: &[CString]| all.iter().map(|one| one.as_ptr()).chain([null()]).collect::<Vec<_>>();
        let script = |file: &CString| {
            [SHELL.as_ptr(), file.as_ptr()].into_iter().chain(pointers(&args[1..])).collect()
        };
        let scripts = files.iter().map(script).collect();
        let (all_args, environment) = (pointers(&args), pointers(&variables));
        args.extend(variables);
        Ok(Program { files, is_searched, scripts, args: all_args, environment, _strings: args })
    }

    /// Replaces this process by the program; why not.
    pub fn exec(&self) -> io::Error {
        let mut denied = None;
        for (file, script) in self.files.iter().zip(&self.scripts) {
            let mut error = self.exec_file(file, &self.args);
            if error.raw_os_error() == Some(libc::ENOEXEC) {
                error = self.exec_file(SHELL, script);
            }
            match error.raw_os_error() {
                Some(libc::ENOENT | libc::ENOTDIR) if self.is_searched => {}
                Some(libc::EACCES) if self.is_searched => denied = Some(error),
                _ => return error,
            }
        }
        denied.unwrap_or_else(|| io::Error::from_raw_os_error(libc::ENOENT))
    }

    fn exec_file(&self, file: &CStr, args: &[*const c_char]) -> io::Error {
        // SAFETY: both lists end in a null pointer; what they point to lives as long as `self`, and is not moved with it.
        io::Error::from_raw_os_error(unsafe {
            execve(file.as_ptr(), args.as_ptr(), self.environment.as_ptr())
        })
    }
}

/// execve(2) without the C library, which keeps the error's number in a place that another process may share: the number.
#[cfg(target_arch = "x86_64")]
unsafe fn execve(file: *const c_char, args: *const *const c_char, environment: *const *const c_char) -> i32 {
    let result: libc::c_long;
    // SAFETY: by the caller; the kernel changes no memory of ours when it fails.
    unsafe {
        core::arch::asm!(
            "syscall",
            inlateout("rax") libc::SYS_execve => result,
            in("rdi") file, in("rsi") args, in("rdx") environment,
            lateout("rcx") _, lateout("r11") _,
            options(nostack),
        );
    }
    -result as i32
}

#[cfg(target_arch = "aarch64")]
unsafe fn execve(file: *const c_char, args: *const *const c_char, environment: *const *const c_char) -> i32 {
    let result: libc::c_long;
    // SAFETY: as above.
    unsafe {
        core::arch::asm!(
            "svc 0",
            in("x8") libc::SYS_execve,
            inlateout("x0") file => result,
            in("x1") args, in("x2") environment,
            options(nostack),
        );
    }
    -result as i32
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
unsafe fn execve(file: *const c_char, args: *const *const c_char, environment: *const *const c_char) -> i32 {
    // SAFETY: by the caller.
    unsafe { libc::execve(file, args, environment) };
    io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}
