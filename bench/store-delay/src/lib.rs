//! Lets each write to a store in a local folder take as long as on an object store far away.
//!
//! Preloaded into `hayloft serve` (`LD_PRELOAD`), which is not changed by it. A store in a folder writes an object under a
//! temporary name, syncs it, and then gives it its own name, with one link(2) or rename(2) for each object. These calls wait
//! here for `$STORE_DELAY_MS` first; nobody can see the object before. Reading, listing and deleting take no longer. Calls of
//! several threads wait side by side, as several PUTs do.

#![allow(unsafe_code)]

use std::ffi::{c_char, c_int, c_uint};
use std::sync::OnceLock;
use std::time::Duration;

fn wait() {
    static DELAY: OnceLock<Duration> = OnceLock::new();
    let delay = DELAY.get_or_init(|| {
        let given = std::env::var("STORE_DELAY_MS").ok().and_then(|ms| ms.parse().ok());
        given.and_then(|ms: f64| Duration::try_from_secs_f64(ms / 1e3).ok()).unwrap_or_default()
    });
    if !delay.is_zero() {
        std::thread::sleep(*delay);
    }
}

/// As renameat2(2), and a while later.
///
/// # Safety
/// As for the call itself: both paths end in NUL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn renameat2(
    from_dir: c_int,
    from: *const c_char,
    to_dir: c_int,
    to: *const c_char,
    flags: c_uint,
) -> c_int {
    wait();
    // SAFETY: handed on as they came.
    unsafe { libc::syscall(libc::SYS_renameat2, from_dir, from, to_dir, to, flags) as c_int }
}

/// As renameat(2), and a while later.
///
/// # Safety
/// As for [`renameat2`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn renameat(
    from_dir: c_int,
    from: *const c_char,
    to_dir: c_int,
    to: *const c_char,
) -> c_int {
    // SAFETY: handed on as they came.
    unsafe { renameat2(from_dir, from, to_dir, to, 0) }
}

/// As rename(2), and a while later.
///
/// # Safety
/// As for [`renameat2`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rename(from: *const c_char, to: *const c_char) -> c_int {
    // SAFETY: handed on as they came.
    unsafe { renameat2(libc::AT_FDCWD, from, libc::AT_FDCWD, to, 0) }
}

/// As linkat(2), and a while later.
///
/// # Safety
/// As for [`renameat2`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn linkat(
    from_dir: c_int,
    from: *const c_char,
    to_dir: c_int,
    to: *const c_char,
    flags: c_int,
) -> c_int {
    wait();
    // SAFETY: handed on as they came.
    unsafe { libc::syscall(libc::SYS_linkat, from_dir, from, to_dir, to, flags) as c_int }
}

/// As link(2), and a while later.
///
/// # Safety
/// As for [`renameat2`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn link(from: *const c_char, to: *const c_char) -> c_int {
    // SAFETY: handed on as they came.
    unsafe { linkat(libc::AT_FDCWD, from, libc::AT_FDCWD, to, 0) }
}

#[cfg(test)]
mod tests {
    use std::ffi::{CString, c_char};
    use std::fs;
    use std::io;
    use std::os::unix::ffi::OsStrExt;
    use std::path::Path;

    type Call = unsafe extern "C" fn(*const c_char, *const c_char) -> i32;

    fn call(function: Call, from: &Path, to: &Path) -> io::Result<()> {
        let [from, to] = [from, to].map(|path| CString::new(path.as_os_str().as_bytes()).unwrap());
        // SAFETY: both paths end in NUL.
        if unsafe { function(from.as_ptr(), to.as_ptr()) } == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }

    #[test]
    fn names_are_given_as_without_it_and_errors_come_back() {
        let dir = std::env::temp_dir().join(format!("store-delay-{}", std::process::id()));
        fs::create_dir(&dir).unwrap();
        let [staged, object, moved] = ["staged", "object", "moved"].map(|name| dir.join(name));
        fs::write(&staged, "content").unwrap();
        call(super::link, &staged, &object).unwrap();
        assert_eq!(call(super::link, &staged, &object).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        call(super::rename, &object, &moved).unwrap();
        assert_eq!(call(super::rename, &object, &moved).unwrap_err().kind(), io::ErrorKind::NotFound);
        assert_eq!(fs::read(&moved).unwrap(), b"content");
        assert!(staged.exists() && !object.exists());
        fs::remove_dir_all(&dir).unwrap();
    }
}
